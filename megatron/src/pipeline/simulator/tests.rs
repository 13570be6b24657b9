//! Tests of complete schedules, and of the errors for others.

use super::super::{ChunkCosts, forward_only, gpipe, interleaved, one_f_one_b};
use super::*;

/// Every schedule with up to 6 stages, 4 chunks and 16 microbatches, with late and early receives:
/// (kind, pp, v, m, schedule).
fn all_small() -> Vec<(&'static str, usize, usize, usize, Schedule)> {
    let mut all = Vec::new();
    for pp in 1..=6 {
        for m in 1..=16 {
            all.push(("gpipe", pp, 1, m, gpipe(pp, m).unwrap()));
            all.push(("1f1b", pp, 1, m, one_f_one_b(pp, m, 0).unwrap()));
            for v in 2..=4 {
                all.extend(
                    interleaved(pp, v, m).ok().map(|schedule| ("interleaved", pp, v, m, schedule)),
                );
            }
        }
    }
    assert!(all.iter().filter(|(kind, ..)| *kind == "interleaved").count() > 50);
    let early: Vec<_> =
        all.iter().map(|(kind, pp, v, m, s)| (*kind, *pp, *v, *m, s.receiving_early())).collect();
    all.extend(early);
    all
}

/// Costs of `f` for forwards and `b` for backwards on every chunk.
fn even(schedule: &Schedule, f: u64, b: u64) -> Costs {
    let chunk = ChunkCosts { forward: f, input_gradients: b, ..ChunkCosts::default() };
    Costs::even(schedule.pp(), schedule.num_chunks, chunk).unwrap()
}

fn refusal(schedule: &Schedule) -> String {
    simulate(schedule, &even(schedule, 1, 2)).expect_err("must be refused").to_string()
}

#[test]
fn every_small_schedule_is_complete_and_has_the_bubble_of_the_literature() {
    for (kind, pp, v, m, schedule) in all_small() {
        for (f, b) in [(1, 1), (1, 2), (2, 3)] {
            let report = simulate(&schedule, &even(&schedule, f, b))
                .unwrap_or_else(|e| panic!("{kind} {pp} {v} {m}: {e}"));
            let bubble = (pp - 1) as f64 / (v * m + pp - 1) as f64;
            assert!(
                (report.bubble - bubble).abs() < 1e-12,
                "{kind} pp {pp} v {v} m {m} f {f} b {b}: {} ≠ {bubble}",
                report.bubble
            );
        }
    }
}

#[test]
fn every_small_schedule_has_the_known_peak() {
    for (kind, pp, v, m, schedule) in all_small() {
        let report = simulate(&schedule, &even(&schedule, 1, 2)).unwrap();
        for stage in 0..pp {
            let peak = match kind {
                "gpipe" => m,
                "1f1b" => (pp - stage).min(m),
                _ => (2 * (pp - stage - 1) + (v - 1) * pp + 1).min(v * m),
            };
            assert_eq!(
                report.peak_in_flight[stage], peak,
                "{kind} pp {pp} v {v} m {m} stage {stage}"
            );
        }
    }
}

#[test]
fn every_small_schedule_holds_the_input_of_one_pass_ahead_at_most() {
    for (kind, pp, v, m, schedule) in all_small() {
        let costs = even(&schedule, 1, 2);
        let late = simulate(&schedule, &costs).unwrap().peak_receives;
        let early = simulate(&schedule.receiving_early(), &costs).unwrap().peak_receives;
        for stage in 0..pp {
            assert!(
                late[stage] <= 2 && early[stage] <= 2,
                "{kind} pp {pp} v {v} m {m} stage {stage}"
            );
            // Interleaved receives follow the order of the sending stage, which may be one ahead of
            // their use.
            assert!(
                kind == "interleaved" || schedule == schedule.receiving_early() || late[stage] <= 1
            );
        }
    }
}

#[test]
fn every_small_forward_only_schedule_is_complete() {
    for (pp, v) in [(1, 1), (2, 1), (3, 1), (6, 1), (2, 2), (3, 4), (6, 3)] {
        for m in 1..=16 {
            let schedule = forward_only(pp, v, m).unwrap();
            for schedule in [schedule.receiving_early(), schedule] {
                let report = simulate(&schedule, &even(&schedule, 1, 2)).unwrap();
                assert_eq!(report.peak_in_flight, vec![0; pp]);
                assert!(report.timeline.iter().all(|slots| slots.len() == m * v));
            }
        }
    }
}

fn samples() -> Vec<Schedule> {
    let late = [gpipe(3, 3).unwrap(), one_f_one_b(3, 4, 0).unwrap(), interleaved(2, 2, 4).unwrap()];
    late.into_iter().flat_map(|schedule| [schedule.receiving_early(), schedule]).collect()
}

#[test]
fn a_schedule_with_any_action_left_out_is_rejected() {
    for schedule in samples() {
        for p in 0..schedule.pp() {
            for i in 0..schedule.stages[p].len() {
                let mut mutated = schedule.clone();
                let removed = mutated.stages[p].remove(i);
                assert!(
                    simulate(&mutated, &even(&mutated, 1, 2)).is_err(),
                    "stage {p} without {removed}"
                );
            }
        }
    }
}

#[test]
fn a_schedule_with_any_action_twice_is_rejected() {
    for schedule in samples() {
        for p in 0..schedule.pp() {
            for i in 0..schedule.stages[p].len() {
                let mut mutated = schedule.clone();
                let action = mutated.stages[p][i];
                mutated.stages[p].insert(i, action);
                assert!(
                    simulate(&mutated, &even(&mutated, 1, 2)).is_err(),
                    "stage {p} with {action} twice"
                );
            }
        }
    }
}

#[test]
fn a_deadlock_names_the_stuck_stages_and_their_actions() {
    let mut schedule = one_f_one_b(2, 1, 0).unwrap();
    // Stage 0 waits for the gradient before it sends the activation that the gradient depends on.
    let send = schedule.stages[0].remove(1);
    schedule.stages[0].push(send);
    assert_eq!(
        refusal(&schedule),
        "the schedule deadlocks: stage 0 at action 2 (backward of microbatch 0, chunk 0), stage 1 \
         at action 1 (forward of microbatch 0, chunk 0) wait forever"
    );
}

#[test]
fn messages_received_in_another_order_than_sent_are_rejected() {
    let mut schedule = gpipe(2, 2).unwrap().receiving_early();
    schedule.stages[1].swap(0, 1);
    let text = refusal(&schedule);
    assert!(
        text.contains("forward of microbatch 0, chunk 0 gets the message for microbatch 1"),
        "{text}"
    );
}

#[test]
fn backwards_out_of_microbatch_order_are_rejected() {
    let mut schedule = gpipe(1, 2).unwrap();
    schedule.stages[0].swap(2, 3);
    assert!(refusal(&schedule).contains("gradients must be summed in one order"));
}

#[test]
fn a_backward_before_its_forward_is_rejected() {
    let mut schedule = gpipe(1, 1).unwrap();
    schedule.stages[0].swap(0, 1);
    assert!(refusal(&schedule).contains("comes before its forward"));
}

/// A stage's order of passes on one chunk: `F0` forward, `B0` whole backward, `I0` and `W0` its
/// halves.
fn of_passes(order: &str) -> Schedule {
    let pass = |word: &str| Compute {
        pass: match &word[..1] {
            "F" => Pass::Forward,
            "B" => Pass::Backward,
            "I" => Pass::InputGradients,
            _ => Pass::WeightGradients,
        },
        microbatch: word[1..].parse().unwrap(),
        chunk: 0,
    };
    let order: Vec<_> = order.split(' ').map(pass).collect();
    let m = order.iter().map(|c| c.microbatch + 1).max().unwrap();
    Schedule::with_messages(&[order], m, 1)
}

#[test]
fn weight_gradients_come_once_after_their_input_gradients_and_in_microbatch_order() {
    let halves = of_passes("F0 F1 I0 I1 W0 W1");
    assert_eq!(simulate(&halves, &even(&halves, 1, 2)).unwrap().peak_delayed, [2]);
    for (order, why) in [
        ("F0 W0 I0", "comes before its input gradients"),
        ("F0 I0 W0 W0", "runs a second time"),
        ("F0 B0 W0", "runs a second time"),
        ("F0 I0", "never runs the weight gradients of microbatch 0"),
        ("F0 F1 I0 I1 W1 W0", "gradients must be summed in one order"),
        ("F0 F1 I1 I0 W0 W1", "gradients must be summed in one order"),
        // A whole backward sums weight gradients, too, but the first microbatch's must come before
        // it.
        ("F0 F1 I0 B1 W0", "gradients must be summed in one order"),
    ] {
        let text = refusal(&of_passes(order));
        assert!(text.contains(why), "{order}: {text}");
    }
}

#[test]
fn messages_to_and_from_the_wrong_stage_are_rejected() {
    let mut schedule = gpipe(3, 1).unwrap();
    schedule.stages[0][1] =
        Action::Send { what: Payload::Activation, microbatch: 0, chunk: 0, to: 2 };
    assert!(refusal(&schedule).contains("goes to a stage that does not need it"));
    for p in [0, 1] {
        let mut schedule = gpipe(3, 1).unwrap();
        schedule.stages[p].insert(
            0,
            Action::Recv { what: Payload::Activation, microbatch: 0, chunk: 0, from: 2 },
        );
        assert!(refusal(&schedule).contains("comes from a stage that does not make it"));
    }
}

#[test]
fn a_send_before_its_result_or_a_second_time_is_rejected() {
    let mut schedule = gpipe(2, 1).unwrap();
    schedule.stages[0].swap(0, 1);
    assert!(refusal(&schedule).contains("has nothing to send"));
    let mut schedule = gpipe(2, 1).unwrap();
    let send = schedule.stages[0][1];
    schedule.stages[0].insert(1, send);
    assert!(refusal(&schedule).contains("has nothing to send"));
}

#[test]
fn a_pass_before_its_input_is_received_is_rejected() {
    let mut schedule = gpipe(2, 1).unwrap();
    schedule.stages[1].swap(0, 1);
    assert!(refusal(&schedule).contains("has no input"));
}

#[test]
fn microbatches_and_chunks_that_do_not_exist_are_rejected() {
    let mut schedule = gpipe(1, 1).unwrap();
    schedule.stages[0].push(Action::Forward { microbatch: 1, chunk: 0 });
    assert!(refusal(&schedule).contains("outside 1 microbatches"));
}
