"""Memory and cores of hosts and GPUs, from the places of ranks."""

from __future__ import annotations

from workflows.launch.memory_pools import Host, MemoryPool, RankPlace, crowded, gpus_of, hosts_of, short_of_cores

GB = 10**9


def test_ranks_with_more_threads_than_cores_are_named() -> None:
    assert short_of_cores([(2, 2), (1, 4)]) == []
    (text,) = short_of_cores([(2, 2), (4, 1), (3, 2)])
    assert text.startswith("rank 1 (and 1 more) has 4 threads on 1 core: ")
    assert "--bind-to none or --map-by slot:PE=4; srun: --cpus-per-task=4" in text and "OMP_NUM_THREADS=1" in text


def test_ranks_are_gathered_by_host() -> None:
    places = [("a", 0, 2, 8 * GB), ("b", 1, 4, 9 * GB), ("a", None, 2, 7 * GB), ("b", 2, 4, 9 * GB)]
    hosts = hosts_of([RankPlace(*place) for place in places])
    assert hosts == [Host(MemoryPool("a", (0,), 7 * GB), 2, 2), Host(MemoryPool("b", (1, 2), 9 * GB), 2, 4)]
    assert [line[:22] for line in crowded([Host(MemoryPool("a", (0, 1), 8 * GB), 5, 2), hosts[1]])] == [
        "5 ranks share 2 cores "
    ]


def test_limits_of_processes_count_together() -> None:
    free = RankPlace("a", 0, 2, 8 * GB, "by SLURM_MEM_PER_NODE (sbatch --mem)")
    bound = RankPlace("a", 1, 2, 8 * GB, "", 3 * GB, "by ulimit -v")
    (alone,), (both,) = hosts_of([free, RankPlace("a", 1, 2, 9 * GB)]), hosts_of([bound, bound])
    assert alone.memory == MemoryPool("a", (0, 1), 8 * GB, "by SLURM_MEM_PER_NODE (sbatch --mem)")
    assert both.memory == MemoryPool("a", (1, 1), 6 * GB, "by ulimit -v of 2 ranks")


def test_each_trainer_has_its_gpu() -> None:
    places = [RankPlace("a", 0, 2, GB, device="cuda:1", device_bytes=5 * GB), RankPlace("a", None, 2, GB)]
    assert gpus_of(places) == [MemoryPool("cuda:1 of a", (0,), 5 * GB)]
