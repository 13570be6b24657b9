//! Every kernel against candle's differentiable operations, finite differences, and itself on other threads and cuts.

mod attention;
mod common;
mod linear;
mod norm;
