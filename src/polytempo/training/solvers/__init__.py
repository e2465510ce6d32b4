"""How one job is computed: by autograd, or batched for fully connected layers."""
