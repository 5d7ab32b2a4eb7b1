"""Makes and stores sharding plans, which assign rows and columns of tables to ranks.

plan.py defines the plan that a version stores, constraints.py the publisher's constraints, and
sharding_types.py the ways to shard a table. host_plan.py divides the tables into parts, one for
each host, and part_plan.py derives the plan of a part. planner.py makes plans with torchrec's
planner (planner_request.py, then planner_search.py) and converts stored plans to torchrec's.
access_counts.py computes the reads of each rank from measured counts, and balance.py makes plans
that balance them.
"""
