"""The lesson: data-parallel training in eleven chapters, drawn from runs on the reader's own machine."""
