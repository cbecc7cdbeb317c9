"""What a job's gradients and steps look like: sparsity statistics, traces and reports."""
