"""What a run recorded, shown: a page while it runs and after, and a report in one file. Never imported by training.

columns.py    lines of steps as columns of numbers
pyramid.py    one rank's steps: raw, and in bins, in chunk files that never change
rank_feed.py  reads one rank's events, from where it was
run.py        one run: what is asked of it by the page and the report
samples.py    which rank took which sample
saved.py      checkpoints as they lie on the disk
catalog.py    which runs there are
exports.py    CSV, Chrome trace, TensorBoard, Prometheus
server.py     the page's server
serve.py      its process: address, token, browser
report.py     one HTML file
static/       the page itself: plain ES modules
"""
