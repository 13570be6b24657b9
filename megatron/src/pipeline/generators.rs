//! Generators of schedules: pure functions of the numbers of stages, chunks and microbatches.
//!
//! GPipe: Huang et al. 2019. 1F1B and interleaved 1F1B: Narayanan et al. 2021 (§2.2), in
//! Megatron-LM's order. In all schedules each chunk's backwards run in microbatch order, so that
//! gradients are summed in the same order under every schedule.

use super::schedule::{Compute, Pass, Schedule};
use crate::config::ScheduleKind;
use crate::{Error, Result};

/// The training schedule of a run. `v` is 1 unless interleaved; `extra_warmup` (see
/// [`one_f_one_b`]) is 0 unless 1F1B.
///
/// # Errors
/// If there is no such schedule for these sizes.
pub fn generate(
    kind: ScheduleKind,
    pp: usize,
    v: usize,
    m: usize,
    extra_warmup: usize,
) -> Result<Schedule> {
    if v != 1 && kind != ScheduleKind::Interleaved {
        return Err(Error::config(format!(
            "v = {v} virtual stages per stage need the interleaved schedule; choose it or leave \
             num-layers-per-virtual-pipeline-stage out"
        )));
    }
    if extra_warmup > 0 && kind != ScheduleKind::OneFOneB {
        return Err(Error::config(format!(
            "{extra_warmup} extra warm-up forwards (pipeline-extra-warmup) need the 1f1b schedule; \
             choose it or leave pipeline-extra-warmup out"
        )));
    }
    match kind {
        ScheduleKind::Gpipe => gpipe(pp, m),
        ScheduleKind::OneFOneB => one_f_one_b(pp, m, extra_warmup),
        ScheduleKind::Interleaved => interleaved(pp, v, m),
    }
}

/// All `m` forwards, then all backwards, on `pp` stages. Every stage keeps the activations of m
/// microbatches.
///
/// # Errors
/// If a size is 0.
pub fn gpipe(pp: usize, m: usize) -> Result<Schedule> {
    warm_up_then_alternate(pp, 1, m, |_| m)
}

/// One forward, one backward, on `pp` stages: stage p runs pp − p − 1 forwards ahead, so it keeps
/// the activations of at most pp − p microbatches.
///
/// With `extra_warmup` the first stage runs that many more forwards ahead, later stages run fewer,
/// and the last stage, which waits for no gradient, runs none. With pp − 1 extra forwards and
/// delayed weight gradients this is ZB-H2 (Qi et al. 2023, §2.2). Interleaved schedules cannot use
/// it: their first stage's forwards of later chunks depend on forwards that the last stage runs
/// after backwards, and these backwards wait for the first stage.
///
/// # Errors
/// If the number of stages or microbatches is 0.
pub fn one_f_one_b(pp: usize, m: usize, extra_warmup: usize) -> Result<Schedule> {
    let extra = |behind: usize| {
        if behind == 0 { 0 } else { extra_warmup.saturating_mul(behind).div_ceil(pp - 1) }
    };
    warm_up_then_alternate(pp, 1, m, |stage| (pp - stage - 1).saturating_add(extra(pp - stage - 1)))
}

/// 1F1B over `v` chunks per stage, in groups of `pp` microbatches. A group runs through a stage's
/// first chunk, then its second, and so on; backward uses the reverse order of chunks. Stage p runs
/// 2(pp − p − 1) + (v − 1)·pp forwards ahead.
///
/// # Errors
/// If pp < 2, v < 2, or m is not a multiple of pp.
pub fn interleaved(pp: usize, v: usize, m: usize) -> Result<Schedule> {
    if pp < 2 || v < 2 {
        return Err(Error::config(format!(
            "the interleaved schedule needs pp ≥ 2 and v ≥ 2, but pp = {pp} and v = {v} (layers per stage / layers per \
             virtual stage); use 1f1b, or change num-layers-per-virtual-pipeline-stage"
        )));
    }
    if !m.is_multiple_of(pp) {
        let (below, above) = (m / pp * pp, m.div_ceil(pp) * pp);
        let nearest = if below == 0 { above.to_string() } else { format!("{below} or {above}") };
        return Err(Error::config(format!(
            "the interleaved schedule needs microbatches M = GBS / (MBS·dp) to be a multiple of pp, but M = {m} and pp = \
             {pp}; change the global batch size so that M is {nearest}, or use 1f1b"
        )));
    }
    warm_up_then_alternate(pp, v, m, |stage| 2 * (pp - stage - 1) + (v - 1) * pp)
}

/// Only forwards, for evaluation. With `v` > 1 they run in groups of at most `pp` microbatches, as
/// in [`interleaved`], but m need not be a multiple of pp.
///
/// # Errors
/// If a size is 0, or v > 1 on a single stage.
pub fn forward_only(pp: usize, v: usize, m: usize) -> Result<Schedule> {
    check_sizes(pp, v, m)?;
    let order: Vec<_> = (0..m * v).map(|k| nth(Pass::Forward, k, pp, v, m)).collect();
    Ok(Schedule::with_messages(&vec![order; pp], m, v))
}

/// Stage p runs `warm_up(p)` forwards (at most all), then alternates one forward and one backward,
/// then runs the remaining backwards.
fn warm_up_then_alternate(
    pp: usize,
    v: usize,
    m: usize,
    warm_up: impl Fn(usize) -> usize,
) -> Result<Schedule> {
    check_sizes(pp, v, m)?;
    let total = m * v;
    let order = |stage: usize| {
        let ahead = warm_up(stage).min(total);
        let forwards = (0..total).map(|k| nth(Pass::Forward, k, pp, v, m));
        let mut backwards = (0..total).map(|k| nth(Pass::Backward, k, pp, v, m));
        let mut order = Vec::with_capacity(2 * total);
        for (k, forward) in forwards.enumerate() {
            order.push(forward);
            if k >= ahead {
                order.extend(backwards.next());
            }
        }
        order.extend(backwards);
        order
    };
    Ok(Schedule::with_messages(&(0..pp).map(order).collect::<Vec<_>>(), m, v))
}

/// The k-th forward or backward of every stage: groups of pp microbatches (the last may be smaller)
/// run through one chunk after another.
fn nth(pass: Pass, k: usize, pp: usize, v: usize, m: usize) -> Compute {
    let first = k / (pp * v) * pp; // of the group
    let group = pp.min(m - first);
    let within = k - first * v;
    let chunk = within / group;
    Compute {
        pass,
        microbatch: first + within % group,
        chunk: if pass == Pass::Forward { chunk } else { v - 1 - chunk },
    }
}

fn check_sizes(pp: usize, v: usize, m: usize) -> Result<()> {
    if pp == 0 || v == 0 || m == 0 {
        return Err(Error::config(format!(
            "a pipeline needs at least one stage, chunk and microbatch, but pp = {pp}, v = {v} and M = GBS / (MBS·dp) = {m}"
        )));
    }
    if pp == 1 && v > 1 {
        return Err(Error::config(format!(
            "v = {v} virtual stages need pp ≥ 2, but pp = 1; set v to 1"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::schedule::{Action, Payload};

    /// Passes of a stage as `F(microbatch)(chunk letter)`.
    fn passes(schedule: &Schedule, stage: usize) -> String {
        let letter = |chunk: usize| char::from(b'a' + chunk as u8);
        let words = schedule.stages[stage].iter().filter_map(|action| match action {
            Action::Forward { microbatch, chunk } => {
                Some(format!("F{microbatch}{}", letter(*chunk)))
            }
            Action::Backward { microbatch, chunk } => {
                Some(format!("B{microbatch}{}", letter(*chunk)))
            }
            _ => None,
        });
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn gpipe_runs_all_forwards_then_backwards_in_microbatch_order() {
        let schedule = gpipe(2, 3).unwrap();
        assert_eq!(passes(&schedule, 0), "F0a F1a F2a B0a B1a B2a");
        assert_eq!(passes(&schedule, 1), passes(&schedule, 0));
    }

    #[test]
    fn one_f_one_b_warms_up_with_the_stages_behind() {
        let schedule = one_f_one_b(3, 4, 0).unwrap();
        assert_eq!(passes(&schedule, 0), "F0a F1a F2a B0a F3a B1a B2a B3a");
        assert_eq!(passes(&schedule, 1), "F0a F1a B0a F2a B1a F3a B2a B3a");
        assert_eq!(passes(&schedule, 2), "F0a B0a F1a B1a F2a B2a F3a B3a");
    }

    #[test]
    fn one_f_one_b_warms_up_with_at_most_all_microbatches() {
        assert_eq!(passes(&one_f_one_b(4, 2, 0).unwrap(), 0), "F0a F1a B0a B1a");
        for extra in [2, usize::MAX / 2 + 1, usize::MAX] {
            assert_eq!(
                passes(&one_f_one_b(3, 4, extra).unwrap(), 0),
                "F0a F1a F2a F3a B0a B1a B2a B3a",
                "{extra}"
            );
        }
    }

    #[test]
    fn extra_warm_up_falls_from_the_first_stage_to_none_on_the_last() {
        let schedule = one_f_one_b(3, 5, 2).unwrap();
        assert_eq!(passes(&schedule, 0), "F0a F1a F2a F3a F4a B0a B1a B2a B3a B4a");
        assert_eq!(passes(&schedule, 1), "F0a F1a F2a B0a F3a B1a F4a B2a B3a B4a");
        assert_eq!(passes(&schedule, 2), passes(&one_f_one_b(3, 5, 0).unwrap(), 2));
        // If the extra forwards do not divide evenly, earlier stages get more.
        assert_eq!(passes(&one_f_one_b(3, 5, 1).unwrap(), 1), passes(&schedule, 1));
    }

    #[test]
    fn interleaved_is_in_the_order_of_megatron() {
        let schedule = interleaved(2, 2, 4).unwrap();
        // Warm-up of stage 0: 2·1 + 1·2 = 4; of stage 1: 2.
        assert_eq!(
            passes(&schedule, 0),
            "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a"
        );
        assert_eq!(
            passes(&schedule, 1),
            "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"
        );
    }

    #[test]
    fn messages_surround_the_passes_that_make_and_use_them() {
        let schedule = interleaved(2, 2, 2).unwrap();
        let recv = |what, microbatch, chunk| Action::Recv { what, microbatch, chunk, from: 1 };
        let send = |what, microbatch, chunk| Action::Send { what, microbatch, chunk, to: 1 };
        let forward = |microbatch, chunk| Action::Forward { microbatch, chunk };
        let backward = |microbatch, chunk| Action::Backward { microbatch, chunk };
        use Payload::{Activation, Gradient};
        #[rustfmt::skip]
        let expected = [
            forward(0, 0), send(Activation, 0, 0), forward(1, 0), send(Activation, 1, 0),
            recv(Activation, 0, 1), forward(0, 1), send(Activation, 0, 1),
            recv(Activation, 1, 1), forward(1, 1), send(Activation, 1, 1),
            recv(Gradient, 0, 1), backward(0, 1), send(Gradient, 0, 1),
            recv(Gradient, 1, 1), backward(1, 1), send(Gradient, 1, 1),
            recv(Gradient, 0, 0), backward(0, 0), recv(Gradient, 1, 0), backward(1, 0),
        ];
        assert_eq!(schedule.stages[0], expected);
    }

    #[test]
    fn a_single_stage_sends_nothing() {
        let schedule = one_f_one_b(1, 3, 0).unwrap();
        assert_eq!(schedule.stages[0].len(), 6);
        assert_eq!(passes(&schedule, 0), "F0a B0a F1a B1a F2a B2a");
    }

    #[test]
    fn forward_only_takes_any_number_of_microbatches() {
        let schedule = forward_only(2, 2, 3).unwrap();
        assert_eq!(passes(&schedule, 1), "F0a F1a F0b F1b F2a F2b");
        assert!(!schedule.has_backward);
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused_with_equation_and_advice() {
        let message = |result: Result<Schedule>| result.expect_err("must be refused").to_string();
        let text = message(interleaved(4, 2, 6));
        assert!(text.contains("M = 6 and pp = 4") && text.contains("4 or 8"), "{text}");
        assert!(message(interleaved(4, 2, 3)).contains("M is 4,"));
        assert!(message(interleaved(4, 1, 4)).contains("v = 1"));
        assert!(message(interleaved(1, 2, 4)).contains("pp = 1"));
        assert!(message(interleaved(2, 2, 0)).contains("= 0"));
        assert!(message(gpipe(0, 4)).contains("pp = 0"));
        assert!(message(one_f_one_b(4, 0, 0)).contains("= 0"));
        assert!(message(forward_only(1, 2, 4)).contains("set v to 1"));
        assert!(
            message(generate(ScheduleKind::OneFOneB, 2, 2, 4, 0))
                .contains("need the interleaved schedule")
        );
        for (kind, v) in [(ScheduleKind::Gpipe, 1), (ScheduleKind::Interleaved, 2)] {
            assert!(message(generate(kind, 2, v, 4, 1)).contains("need the 1f1b schedule"));
        }
    }
}
