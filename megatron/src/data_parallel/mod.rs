//! Data parallelism: reduction of gradients over replicas, bucket by bucket (Li et al. 2020), whole
//! or scattered (ZeRO-1, Rajbhandari et al. 2020); and replicas of a model that candle trains.

mod declarations;
mod module;
mod reducer;

pub use module::{DataParallel, DataParallelOptions};
pub use reducer::{GradientReducer, shard};
