//! How many communicators a rank of a layout has: on a GPU each takes streams, for which there must
//! be hardware queues.

use crate::Result;
use crate::config::ParallelConfig;
use crate::pipeline::generate;
use crate::topology::{Axis, ProcessGroups, RankGrid};

/// The most that any rank has, where each group with other ranks in it is one, and each kind of
/// messages to or from another stage.
///
/// # Errors
/// If the layout contradicts itself.
pub fn most_communicators(parallel: &ParallelConfig) -> Result<usize> {
    let (pp, v) = (parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_size);
    let grid = RankGrid::from_config(parallel)?;
    // However many microbatches there are, and however far stages run ahead, the kinds of messages
    // are these.
    let schedule = generate(parallel.schedule, pp, v, pp, 0)?;
    let of_stage = |(stage, &rank): (usize, &usize)| {
        let lanes: usize = schedule.lanes(stage).iter().map(Vec::len).sum();
        ProcessGroups::num_shared(&grid, rank) + lanes
    };
    // Ranks of a stage have as many.
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
