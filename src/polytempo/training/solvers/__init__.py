"""How one job is computed: by autograd, or by compiled code for chains of common layers."""
