"""Report a run, or the comparison of two, as one HTML page made of what the runs have left in their folders."""

from lockstep.html_report.markup import element as element, table as table
from lockstep.html_report.page import render as render, render_checks as render_checks
from lockstep.html_report.run import LOG as LOG, read_run as read_run
