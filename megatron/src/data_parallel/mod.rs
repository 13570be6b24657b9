//! Data parallelism: reduction of gradients over replicas, bucket by bucket (Li et al. 2020), whole
//! or scattered (ZeRO-1, Rajbhandari et al. 2020).

mod reducer;

pub use reducer::{GradientReducer, shard};
