//! Counts the communicators of a rank. On a GPU each communicator takes streams, which need
//! hardware queues.

use crate::Result;
use crate::config::ParallelConfig;
use crate::pipeline::generate;
use crate::topology::{Axis, ProcessGroups, RankGrid};

/// The largest number of communicators of any rank. Each group with more than one rank is one
/// communicator, and so is each kind of message to or from another stage.
///
/// # Errors
/// If the layout is inconsistent.
pub fn most_communicators(parallel: &ParallelConfig) -> Result<usize> {
    let (pp, v) = (parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_size);
    let grid = RankGrid::from_config(parallel)?;
    // The kinds of messages depend neither on the number of microbatches nor on how far stages run
    // ahead.
    let schedule = generate(parallel.schedule, pp, v, pp, 0)?;
    let of_stage = |(stage, &rank): (usize, &usize)| {
        let lanes: usize = schedule.lanes(stage).iter().map(Vec::len).sum();
        ProcessGroups::num_shared(&grid, rank) + lanes
    };
    // All ranks of a stage have the same number.
    Ok(grid.group(Axis::Pp, 0).iter().enumerate().map(of_stage).max().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ScheduleKind;

    #[test]
    fn groups_and_messages_of_the_busiest_stage_are_counted() {
        let count_of = |tp, cp, dp, pp, schedule| {
            most_communicators(&ParallelConfig {
                tensor_model_parallel_size: tp,
                context_parallel_size: cp,
                pipeline_model_parallel_size: pp,
                data_parallel_size: dp,
                virtual_pipeline_size: if schedule == ScheduleKind::Interleaved { 2 } else { 1 },
                schedule,
                ..Default::default()
            })
            .unwrap()
        };
        use ScheduleKind::{Interleaved, OneFOneB};
        let count = |tp, dp, pp, schedule| count_of(tp, 1, dp, pp, schedule);
        assert_eq!(count_of(1, 2, 1, 1, OneFOneB), 3, "world, cp, and its ranks as replicas");
        assert_eq!(
            count_of(2, 2, 2, 4, OneFOneB),
            5 + 4,
            "world, tp, cp, replicas, pp, and messages both ways"
        );
        assert_eq!(count(1, 1, 1, OneFOneB), 0);
        assert_eq!(count(1, 2, 1, OneFOneB), 2, "world, dp");
        assert_eq!(count(2, 1, 1, OneFOneB), 2, "world, tp");
        assert_eq!(count(1, 1, 2, OneFOneB), 3 + 2, "world, pp, embedding");
        assert_eq!(count(2, 2, 2, OneFOneB), 5 + 2, "all");
        assert_eq!(
            count(2, 2, 4, OneFOneB),
            4 + 4,
            "a stage amid others has no embedding, but messages both ways"
        );
        assert_eq!(count(2, 2, 2, Interleaved), 5 + 4);
    }
}
