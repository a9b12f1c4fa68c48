"""The picture of schedules on the page on how it works."""

from __future__ import annotations

from tools.ring import PICTURE, picture


def test_the_picture_shows_the_schedules_as_they_are() -> None:
    assert PICTURE.read_text() == picture(), "run `python -m tools.ring`"
    assert PICTURE.read_text().count(" cross to the other node") == 1
