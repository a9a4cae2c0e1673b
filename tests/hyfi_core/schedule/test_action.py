import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyfi_core.errors import RequestError
from hyfi_core.schedule.action import COMPUTE, Action, Schedule, Verb

NUMBER = st.integers(0, 200)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    verb = draw(st.sampled_from(Verb))
    if verb is Verb.REDUCE:
        return Action(verb, draw(NUMBER), 0)
    if verb in (Verb.SEND_G, Verb.RECV_G):
        return Action(verb, draw(NUMBER), draw(NUMBER), None, draw(NUMBER))
    peer = None if verb in COMPUTE else draw(NUMBER)
    return Action(verb, draw(NUMBER), draw(NUMBER), draw(NUMBER), peer)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(Verb.F, 1, 0, 0), "F0.s1.d0"),
        (Action(Verb.B, 12, 1, 34), "B34.s12.d1"),
        (Action(Verb.I, 0, 0, 7), "I7.s0.d0"),
        (Action(Verb.W, 3, 1, 2), "W2.s3.d1"),
        (Action(Verb.SEND_F, 1, 0, 0, 2), "SEND_F0.s1.d0>s2"),
        (Action(Verb.RECV_F, 2, 0, 0, 1), "RECV_F0.s2.d0<s1"),
        (Action(Verb.SEND_B, 2, 1, 5, 0), "SEND_B5.s2.d1>s0"),
        (Action(Verb.RECV_B, 0, 1, 5, 2), "RECV_B5.s0.d1<s2"),
        (Action(Verb.REDUCE, 1, 0), "REDUCE.s1"),
        (Action(Verb.SEND_G, 1, 1, None, 0), "SEND_G.s1.d1>d0"),
        (Action(Verb.RECV_G, 1, 0, None, 1), "RECV_G.s1.d0<d1"),
    ],
)
def test_actions_are_written_like_this(action: Action, text: str) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@settings(deadline=None)
@given(actions())
def test_an_action_comes_back_from_its_text(action: Action) -> None:
    assert Action.parse(str(action)) == action


@settings(deadline=None)
@given(
    st.lists(st.lists(actions(), max_size=6), max_size=4), st.sampled_from(["1f1b", "chimera", "a name with blanks"])
)
def test_a_schedule_comes_back_from_its_text(rows: list[list[Action]], name: str) -> None:
    schedule = Schedule(name, tuple(map(tuple, rows)))
    assert Schedule.from_text(schedule.to_text()) == schedule


@pytest.mark.parametrize(
    "text", ["", "F", "F0", "F.s0.d0", "F00.s1.d0", "F0.s1.d0 ", "SEND_F0.s1.d0<s2", "RECV_G.s1.d0<s1", "REDUCE.s1.d0"]
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"is not an action; write it like F0\.s0\.d0|is not an action"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the first line of a schedule must be 'schedule NAME'"),
        ("1f1b\n0: F0.s0.d0", "the first line of a schedule must be 'schedule NAME'"),
        ("schedule x\n1: F0.s0.d0", "line 2 of a schedule begins with '1:'; it must begin with '0:'"),
        ("schedule x\n0: F0.s0.d0\n\n", "line 3 of a schedule is empty; it must begin with '1:'"),
        ("schedule x\n0: F0.s0.d0 G0", "'G0' is not an action"),
    ],
)
def test_what_is_no_schedule_is_refused(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Schedule.from_text(text)
