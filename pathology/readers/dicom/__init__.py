"""DICOM slides: the files of a series, what they state, and their frames; OpenSlide decodes them."""
