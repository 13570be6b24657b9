//! Every kernel, compared with candle's differentiable operations, textbook formulas, and itself on
//! other numbers of threads and other partitions.

mod activation;
mod attention;
mod common;
mod cross_entropy;
mod dropout;
mod embedding;
mod instruction_sets;
mod linear;
mod norm;
mod optimizer;
mod reduce;
mod regroup;
mod rope;
mod storage;
