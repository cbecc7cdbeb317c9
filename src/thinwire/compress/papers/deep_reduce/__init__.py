"""DeepReduce: ids and values of a sparse gradient, each coded by a code of its own (Xu et al., NeurIPS'21)."""
