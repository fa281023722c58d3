"""FasterMoE's functions, as FastMoE 1.1 has them (PPoPP'22). For new work: ``FMoE(exchange_options={"chunks": ...,
"shadow": ...})``, docs/parallelism.md."""
