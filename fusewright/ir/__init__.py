"""The intermediate representation: nodes, operations, the pointwise table, the validity check and the printer."""
