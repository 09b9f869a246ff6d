"""Speed on one GPU, as ratios against a baseline in the same process. docs/performance.md says how it is measured.

python -m benchmarks.all --budget-minutes 8      everything that fits, one table
python -m benchmarks.flux                        one row alone; the page lists the other scripts
python -m benchmarks.flux --smoke                tiny, on a CPU

Every module and folder here is a command but `common`, which they share, and `results`.
"""
