//! Delays weight gradients, so that a stage computes them while it would otherwise wait.
//!
//! Weight gradients are not needed before the step's end. If a backward first computes and sends
//! only the input gradients, the earlier stages continue a third of a pass sooner. The remaining
//! products fill time that would be idle (Qi et al. 2023, "Zero Bubble Pipeline Parallelism",
//! ZB-H1). This module applies the idea to any training schedule and keeps the schedule's order of
//! forwards and backwards.

use std::collections::{HashMap, VecDeque};

use super::costs::Costs;
use super::schedule::{Compute, Pass, Payload, Schedule, consumer, producer};
use super::simulator::simulate;
use crate::{Error, Result};

/// When a stage computes weight gradients although memory does not force it to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    /// Right after the input gradients are sent.
    AtOnce,
    /// When its next pass has to wait for at least this many quarters of the time that the weight
    /// gradients take; 0: whenever it has to wait.
    InGaps(u64),
}

const POLICIES: [Policy; 6] = [
    Policy::InGaps(4),
    Policy::InGaps(3),
    Policy::InGaps(2),
    Policy::InGaps(1),
    Policy::InGaps(0),
    Policy::AtOnce,
];

/// Splits every backward of `schedule` that may benefit. The input gradients stay where the
/// backward was. The weight gradients move to where the stage would wait for its next message,
/// where its memory is used up, or to the end.
///
/// Memory: a stage holds the activations of forwards before their backward, and the operands of
/// delayed weight gradients. Their sum never exceeds the largest activation memory of any stage of
/// `schedule`, except that one pass may be delayed where nothing else fits.
///
/// Results: each chunk's weight gradients stay in the order of its backwards, so every sum is
/// bitwise the same as under `schedule`.
///
/// Time: the step is never longer, if `costs` are right, because of several policies the one that
/// ends first is taken.
///
/// A backward stays whole if a delay has no benefit: if it has no weight gradients, or if both
/// halves would be adjacent on the first virtual stage.
///
/// # Errors
/// If `schedule` does not pass [`simulate`], has no backward, or is already delayed.
pub fn delay_weight_gradients(schedule: &Schedule, costs: &Costs) -> Result<Schedule> {
    simulate(schedule, costs)?;
    let orders = schedule.orders();
    if !schedule.has_backward
        || orders
            .iter()
            .flatten()
            .any(|c| matches!(c.pass, Pass::InputGradients | Pass::WeightGradients))
    {
        return Err(Error::config(
            "internal error: only schedules with whole backwards can be delayed",
        ));
    }
    let limit = orders
        .iter()
        .enumerate()
        .map(|(stage, order)| most_activations(stage, order, costs))
        .max()
        .unwrap_or(0);
    let mut best: Option<Placed> = None;
    for policy in POLICIES {
        let placed = place(&orders, schedule.num_chunks, costs, limit, policy);
        if best.as_ref().is_none_or(|best| placed.makespan < best.makespan) {
            best = Some(placed);
        }
    }
    let orders = best.map(|placed| placed.orders).unwrap_or(orders);
    Ok(Schedule::with_messages(&orders, schedule.num_microbatches, schedule.num_chunks))
}

/// The largest sum of a stage's activations between forwards and their backwards.
fn most_activations(stage: usize, order: &[Compute], costs: &Costs) -> u64 {
    let (mut held, mut most) = (0, 0);
    for c in order {
        let activations = costs.of(stage, c.chunk).activations;
        match c.pass {
            Pass::Forward => held += activations,
            Pass::Backward | Pass::InputGradients => held -= activations,
            Pass::WeightGradients => {}
        }
        most = most.max(held);
    }
    most
}

/// Orders that include weight gradients, and the time when the last stage is done.
struct Placed {
    orders: Vec<Vec<Compute>>,
    makespan: u64,
}

/// Runs `orders`, which must terminate, and places weight gradients according to `policy`.
fn place(orders: &[Vec<Compute>], v: usize, costs: &Costs, limit: u64, policy: Policy) -> Placed {
    let pp = orders.len();
    let mut stages: Vec<Stage> = (0..pp).map(|_| Stage::default()).collect();
    let mut next = vec![0; pp];
    // Time when the input of (microbatch, stage, chunk) arrives. A stage waits only for results of
    // what it has already sent, so later placements of its weight gradients do not change these
    // times. Every stage can therefore advance as far as its messages reach.
    let mut arrivals: HashMap<(Payload, usize, usize, usize), u64> = HashMap::new();
    let mut progress = true;
    while std::mem::take(&mut progress) {
        for (p, stage) in stages.iter_mut().enumerate() {
            while let Some(&c) = orders[p].get(next[p]) {
                let Some(what) = c.pass.payload() else { break };
                let sent = producer(pp, v, what, p, c.chunk)
                    .map(|_| arrivals.remove(&(what, c.microbatch, p, c.chunk)));
                let Some(arrival) = sent.unwrap_or(Some(0)) else { break };
                stage.make_ready(p, c, arrival, limit, policy, costs);
                stage.run(p, c, arrival, costs);
                if let Some((to, chunk)) = consumer(pp, v, what, p, c.chunk) {
                    arrivals.insert((what, c.microbatch, to, chunk), stage.now);
                }
                if policy == Policy::AtOnce {
                    stage.compute_all(p, costs);
                }
                (next[p], progress) = (next[p] + 1, true);
            }
        }
    }
    for (p, stage) in stages.iter_mut().enumerate() {
        stage.compute_all(p, costs);
    }
    stages[0].merge_backward();
    let makespan = stages.iter().map(|stage| stage.now).max().unwrap_or(0);
    Placed { orders: stages.into_iter().map(|stage| stage.order).collect(), makespan }
}

/// A stage while its passes are placed.
#[derive(Default)]
struct Stage {
    now: u64,
    order: Vec<Compute>,
    /// Weight gradients to be computed, in the order of their backwards.
    delayed: VecDeque<Compute>,
    /// Memory of activations and operands.
    held: u64,
}

impl Stage {
    fn compute_oldest(&mut self, stage: usize, costs: &Costs) {
        if let Some(c) = self.delayed.pop_front() {
            let costs = costs.of(stage, c.chunk);
            self.now += costs.weight_gradients;
            self.held -= costs.operands;
            self.order.push(c);
        }
    }

    fn compute_all(&mut self, stage: usize, costs: &Costs) {
        while !self.delayed.is_empty() {
            self.compute_oldest(stage, costs);
        }
    }

    /// Computes weight gradients until the next pass, whose message arrives at `arrival`, should
    /// begin.
    fn make_ready(
        &mut self,
        stage: usize,
        next: Compute,
        arrival: u64,
        limit: u64,
        policy: Policy,
        costs: &Costs,
    ) {
        let of_next = costs.of(stage, next.chunk);
        let (more, less) = match next.pass {
            Pass::Forward => (of_next.activations, 0),
            _ => (of_next.operands, of_next.activations),
        };
        while !self.delayed.is_empty() && self.held + more > limit + less {
            self.compute_oldest(stage, costs);
        }
        while let (Some(oldest), Policy::InGaps(quarters)) = (self.delayed.front(), policy) {
            let gap = arrival.saturating_sub(self.now);
            if gap == 0 || 4 * gap < quarters * costs.of(stage, oldest.chunk).weight_gradients {
                break;
            }
            self.compute_oldest(stage, costs);
        }
    }

    /// Runs a pass as soon as its message has arrived.
    fn run(&mut self, stage: usize, c: Compute, arrival: u64, costs: &Costs) {
        let of = costs.of(stage, c.chunk);
        self.now = self.now.max(arrival);
        if c.pass == Pass::Forward {
            self.now += of.forward;
            self.held += of.activations;
            self.order.push(c);
            return;
        }
        self.held -= of.activations;
        if (of.weight_gradients, of.operands) == (0, 0) {
            self.now += of.input_gradients;
            self.order.push(c);
            return;
        }
        self.now += of.input_gradients;
        self.held += of.operands;
        self.order.push(Compute { pass: Pass::InputGradients, ..c });
        self.delayed.push_back(Compute { pass: Pass::WeightGradients, ..c });
    }

    /// Merges adjacent halves of a backward on the first virtual stage, where no stage waits for
    /// the input gradients.
    fn merge_backward(&mut self) {
        let halves = std::mem::take(&mut self.order);
        for c in halves {
            match self.order.last_mut() {
                Some(last)
                    if c == (Compute { pass: Pass::WeightGradients, ..*last })
                        && last.pass == Pass::InputGradients
                        && c.chunk == 0 =>
                {
                    last.pass = Pass::Backward;
                }
                _ => self.order.push(c),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ChunkCosts, forward_only, gpipe, interleaved, one_f_one_b, render};
    use super::*;

    fn chunk(forward: u64, input_gradients: u64, weight_gradients: u64) -> ChunkCosts {
        ChunkCosts {
            forward,
            input_gradients,
            weight_gradients,
            activations: 1,
            operands: 1,
            recompute: forward,
        }
    }

    fn even(schedule: &Schedule, each: ChunkCosts) -> Costs {
        Costs::even(schedule.pp(), schedule.num_chunks, each).unwrap()
    }

    /// Every schedule with up to 5 stages, 3 chunks and 12 microbatches.
    fn all_small() -> Vec<(String, Schedule)> {
        let mut all = Vec::new();
        for pp in 1..=5 {
            for m in [1, 2, 3, 4, 6, 8, 12] {
                all.push((format!("gpipe {pp} {m}"), gpipe(pp, m).unwrap()));
                for extra in [0, 1, pp - 1, pp + 3] {
                    all.push((
                        format!("1f1b {pp} {m} +{extra}"),
                        one_f_one_b(pp, m, extra).unwrap(),
                    ));
                }
                for v in 2..=3 {
                    all.extend(
                        interleaved(pp, v, m)
                            .ok()
                            .map(|s| (format!("interleaved {pp} {v} {m}"), s)),
                    );
                }
            }
        }
        all
    }

    /// Even costs of several kinds, and uneven costs with chunks without layers.
    fn some_costs(schedule: &Schedule) -> Vec<Costs> {
        let mut all: Vec<Costs> = [chunk(1, 1, 1), chunk(2, 3, 2), chunk(3, 4, 1)]
            .into_iter()
            .map(|each| even(schedule, each))
            .collect();
        let mut state = 88172645463325252u64;
        for _ in 0..3 {
            let uneven = (0..schedule.pp() * schedule.num_chunks).map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let layers = state % 4;
                let head = 3 * (state >> 8 & 1);
                let c = chunk(7, 9, 6);
                ChunkCosts {
                    forward: layers * c.forward + head,
                    input_gradients: layers * c.input_gradients,
                    weight_gradients: layers * c.weight_gradients,
                    activations: layers,
                    operands: layers,
                    ..ChunkCosts::default()
                }
            });
            all.push(Costs::new(schedule.pp(), uneven.collect()).unwrap());
        }
        all
    }

    /// The passes of a stage without the weight gradients.
    fn skeleton(schedule: &Schedule) -> Vec<Vec<Compute>> {
        let mut orders = schedule.orders();
        for order in &mut orders {
            order.retain(|c| c.pass != Pass::WeightGradients);
            order
                .iter_mut()
                .filter(|c| c.pass == Pass::InputGradients)
                .for_each(|c| c.pass = Pass::Backward);
        }
        orders
    }

    #[test]
    fn every_small_schedule_stays_complete_and_keeps_the_order_of_its_passes() {
        for (name, schedule) in all_small() {
            for costs in some_costs(&schedule) {
                let delayed = delay_weight_gradients(&schedule, &costs).unwrap();
                // Every weight gradient occurs once, after its input gradients, in the order of
                // microbatches; and there is no deadlock.
                for delayed in [delayed.receiving_early(), delayed.clone()] {
                    simulate(&delayed, &costs).unwrap_or_else(|e| panic!("{name} {costs:?}: {e}"));
                }
                assert_eq!(skeleton(&delayed), schedule.orders(), "{name} {costs:?}");
            }
        }
    }

    #[test]
    fn no_step_becomes_longer_and_most_that_have_a_bubble_become_shorter() {
        let (mut shorter, mut all) = (0, 0);
        for (name, schedule) in all_small() {
            for costs in some_costs(&schedule) {
                let makespan = |schedule: &Schedule| simulate(schedule, &costs).unwrap().makespan;
                let before = makespan(&schedule);
                let after = makespan(&delay_weight_gradients(&schedule, &costs).unwrap());
                let at_once = place(
                    &schedule.orders(),
                    schedule.num_chunks,
                    &costs,
                    u64::MAX,
                    Policy::AtOnce,
                )
                .makespan;
                assert!(
                    after <= at_once && at_once <= before,
                    "{name} {costs:?}: {after}, {at_once}, {before}"
                );
                (shorter, all) =
                    (shorter + usize::from(after < before), all + usize::from(schedule.pp() > 1));
            }
        }
        assert!(shorter > all * 2 / 3, "{shorter} of {all}");
    }

    /// Largest memory of a stage's activations and operands over its passes.
    fn most_held(stage: usize, order: &[Compute], costs: &Costs) -> u64 {
        let (mut held, mut most) = (0, 0);
        for c in order {
            let of = costs.of(stage, c.chunk);
            match c.pass {
                Pass::Forward => held += of.activations,
                Pass::Backward => held -= of.activations,
                Pass::InputGradients => held = held + of.operands - of.activations,
                Pass::WeightGradients => held -= of.operands,
            }
            most = most.max(held);
        }
        most
    }

    #[test]
    fn no_stage_holds_more_than_the_fullest_one_keeps_in_activations_anyway() {
        for (name, schedule) in all_small() {
            for costs in some_costs(&schedule) {
                let most = |schedule: &Schedule| {
                    let orders = schedule.orders();
                    orders
                        .iter()
                        .enumerate()
                        .map(|(stage, order)| most_held(stage, order, &costs))
                        .max()
                        .unwrap()
                };
                let delayed = delay_weight_gradients(&schedule, &costs).unwrap();
                assert!(most(&delayed) <= most(&schedule), "{name} {costs:?}");
            }
        }
    }

    #[test]
    fn under_full_recompute_a_stage_owes_one_pass_at_most() {
        for (name, schedule) in all_small() {
            // Almost nothing is kept for backward, and much for the weight gradients.
            let costs =
                even(&schedule, ChunkCosts { activations: 0, operands: 16, ..chunk(2, 5, 2) });
            let report =
                simulate(&delay_weight_gradients(&schedule, &costs).unwrap(), &costs).unwrap();
            assert!(
                report.peak_delayed.iter().all(|delayed| *delayed <= 1),
                "{name}: {:?}",
                report.peak_delayed
            );
        }
    }

    #[test]
    fn one_f_one_b_becomes_zb_h1() {
        for (pp, m) in [(2, 4), (4, 8), (5, 12), (8, 32)] {
            for (f, b, w) in [(1, 1, 1), (5, 6, 4), (10, 11, 10)] {
                let schedule = one_f_one_b(pp, m, 0).unwrap();
                let costs = even(&schedule, chunk(f, b, w));
                let report =
                    simulate(&delay_weight_gradients(&schedule, &costs).unwrap(), &costs).unwrap();
                // Qi et al. 2023, table 1: 1F1B waits for (pp − 1)(F + B + W), ZB-H1 for (pp − 1)(F
                // + B − W).
                let bubble = (pp as u64 - 1) * (f + b - w);
                assert_eq!(
                    report.makespan,
                    m as u64 * (f + b + w) + bubble,
                    "pp {pp} m {m} f {f} b {b} w {w}"
                );
                // §2.3: no more than the first stage of 1F1B has in flight.
                let held = (0..pp).map(|p| report.peak_in_flight[p].max(report.peak_delayed[p]));
                assert!(held.max().unwrap() <= pp, "{report:?}");
            }
        }
    }

    #[test]
    fn with_extra_warm_up_one_f_one_b_becomes_zb_h2() {
        for (pp, m) in [(2, 4), (4, 8), (5, 12), (8, 32)] {
            let schedule = one_f_one_b(pp, m, pp - 1).unwrap();
            let costs = even(&schedule, chunk(1, 1, 1));
            let report =
                simulate(&delay_weight_gradients(&schedule, &costs).unwrap(), &costs).unwrap();
            for (stage, slots) in report.timeline.iter().enumerate() {
                // Qi et al. 2023, §2.2: no stage waits between its first pass and its last.
                assert!(
                    slots.windows(2).all(|pair| pair[0].end == pair[1].start),
                    "pp {pp} m {m} stage {stage}: {slots:?}"
                );
                // The price is activations of 2·pp − 1 microbatches on the first stage.
                assert!(report.peak_in_flight[stage] < 2 * (pp - stage), "{report:?}");
            }
        }
    }

    #[test]
    fn extra_warm_up_hides_a_last_stage_with_longer_passes() {
        // The first stage has four layers. The second has two layers and an output matrix, which
        // computes its whole gradient in forward. A microbatch takes 408 and 386 on them.
        let costs = |of_layers: u64, head| ChunkCosts {
            forward: 33 * of_layers + head,
            input_gradients: 38 * of_layers,
            weight_gradients: 31 * of_layers,
            activations: of_layers,
            operands: of_layers,
            recompute: 0,
        };
        let costs = Costs::new(2, vec![costs(4, 0), costs(2, 182)]).unwrap();
        let wait = |extra| {
            let schedule =
                delay_weight_gradients(&one_f_one_b(2, 8, extra).unwrap(), &costs).unwrap();
            simulate(&schedule, &costs).unwrap().makespan - 8 * 408
        };
        assert!(wait(0) > wait(1) && wait(1) > 0);
        assert_eq!(wait(2), 0);
    }

    #[test]
    fn weight_gradients_fill_gaps_and_the_end_in_the_order_of_backwards() {
        let schedule = one_f_one_b(2, 3, 0).unwrap();
        let costs = even(&schedule, chunk(1, 1, 1));
        let delayed = delay_weight_gradients(&schedule, &costs).unwrap();
        assert_eq!(
            render(&simulate(&delayed, &costs).unwrap()),
            "stage 0 |a0|a1|  |A0   |a2|A1   |A2   |\n\
             stage 1    |a0|A0|a1|A1|w0|a2|A2|w1|w2|\n"
        );
    }

    #[test]
    fn backwards_without_weights_to_delay_stay_whole() {
        let schedule = one_f_one_b(2, 4, 0).unwrap();
        let head = ChunkCosts { forward: 5, ..ChunkCosts::default() };
        let costs = Costs::new(2, vec![chunk(2, 2, 2), head]).unwrap();
        let delayed = delay_weight_gradients(&schedule, &costs).unwrap();
        assert!(
            delayed.orders()[1].iter().all(|c| matches!(c.pass, Pass::Forward | Pass::Backward))
        );
    }

    #[test]
    fn schedules_without_whole_backwards_are_refused() {
        let forward_only = forward_only(2, 1, 2).unwrap();
        let schedule = one_f_one_b(2, 2, 0).unwrap();
        let costs = even(&schedule, chunk(1, 1, 1));
        let delayed = delay_weight_gradients(&schedule, &costs).unwrap();
        for schedule in [forward_only, delayed] {
            let text =
                delay_weight_gradients(&schedule, &costs).expect_err("must be refused").to_string();
            assert!(text.contains("only schedules with whole backwards"), "{text}");
        }
        let text = delay_weight_gradients(&one_f_one_b(3, 2, 0).unwrap(), &costs)
            .expect_err("must be refused")
            .to_string();
        assert!(text.contains("costs of 2 stages"), "{text}");
    }
}
