"""How the next token is chosen: parameters, the reference rules, and the kernels that obey them."""
