"""Reports: one self-contained HTML page about one or several runs, and a static picture of one."""
