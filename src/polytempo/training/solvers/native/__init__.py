"""Native training: small networks as compiled code."""
