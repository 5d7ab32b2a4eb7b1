"""Which rank holds which rows: plan.py is what a version stores, constraints.py what its publisher
asks of the planner, and planner.py makes plans with torchrec's (planner_request.py, then
planner_search.py) and gives stored ones back to it.
"""
