"""Whose code a chapter's `measure` program runs."""

import sys

from chapters.catalog import Chapter
from chapters.contents import all_chapters
from chapters.stages import Stages
from chapters.workbook import open_workbook


def stages_for(chapter: Chapter, mine: bool) -> Stages:
    """The reference; or with `mine` what the reader has, who must have begun this chapter."""
    if not mine:
        return Stages()
    workbook = open_workbook()
    if not workbook.has(chapter):
        sys.exit(f"you have not started it: python -m chapters start {chapter.number}")
    return Stages({each.name: workbook.file(each) for each in all_chapters() if workbook.has(each)})
