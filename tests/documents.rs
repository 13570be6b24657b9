//! Documents packed into samples: under `reset_position_ids` and `reset_attention_mask` each
//! document trains as if it were alone.

use megatron::config::{DecayStyle, PositionEmbedding, RunConfig, SlidingWindow};
use megatron::data::DocumentEnds;
use megatron::train::Sources;
use system_tests::{
    Run, Style, Tokens, context, interleave, largest_relative_difference, layout, sources, tiny,
    train_on,
};

const S: usize = 16;
const STEPS: usize = 4;
const END: u32 = 0;
/// Lengths of the documents in each sample of a step, including their end tokens.
const LENGTHS: [[usize; 3]; 4] = [[4, 5, 7], [1, 7, 8], [3, 3, 10], [2, 12, 2]];
/// Allowed relative differences of losses and of gradient norms; measured differences are up to
/// 6e-7 and 5e-6.
const TOLERANCES: (f64, f64) = (1e-5, 1e-4);

/// Documents that end with [`END`] and contain it nowhere else.
fn documents() -> Vec<Vec<u32>> {
    let mut state = 88172645463325252u64;
    let mut token = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        1 + (state >> 32) as u32 % 100
    };
    let lengths = LENGTHS.iter().flatten().cycle().take(STEPS * 12);
    lengths.map(|&length| (1..length).map(|_| token()).chain([END]).collect()).collect()
}

/// The documents packed together, or each in its own sample, padded with end tokens whose loss does
/// not count.
fn data(packed: bool, reset: bool) -> Sources {
    let mut tokens = Vec::new();
    for mut document in documents() {
        if !packed {
            document.resize(S, END);
        }
        tokens.extend(document);
    }
    tokens.push(END); // the last label
    let ends = DocumentEnds {
        token: END,
        mask_loss: true,
        reset_positions: reset,
        reset_attention: reset,
    };
    Sources { document_ends: Some(ends), ..sources(Tokens { tokens, seq_length: S }) }
}

fn config(style: Style, global_batch_size: usize) -> RunConfig {
    let mut config = tiny(style, 0.0);
    config.training.micro_batch_size = 2;
    config.training.global_batch_size = global_batch_size;
    // Schedules count samples, and the packed run has fewer.
    (config.optimizer.decay_style, config.optimizer.warmup_samples) = (DecayStyle::Constant, 0);
    config.model.init_method_std = 0.2; // positions and neighbours matter from the first step on
    config
}

fn differences(a: &Run, b: &Run) -> (f64, f64) {
    let difference = largest_relative_difference;
    (difference(&a.losses, &b.losses), difference(&a.grad_norms, &b.grad_norms))
}

/// A change that turns one style of model into another.
type Change = fn(&mut RunConfig);

fn styles() -> Vec<(&'static str, Change, Style)> {
    vec![
        ("gpt2", |_| (), Style::Gpt2),
        ("llama", |_| (), Style::Llama),
        ("bloom", |c| c.model.position_embedding = PositionEmbedding::Alibi, Style::Gpt2),
        (
            "window",
            |c| c.model.sliding_window = Some(SlidingWindow { size: 4, full_layers: vec![1, 6] }),
            Style::Llama,
        ),
    ]
}

#[test]
fn packed_documents_train_as_each_alone_on_every_layout() {
    for (name, change, style) in styles() {
        let mut alone = config(style, 12);
        change(&mut alone);
        let alone = train_on(&data(false, false), &alone, None, STEPS).unwrap();
        let mut packed = config(style, 4);
        change(&mut packed);
        let one = train_on(&data(true, true), &packed, None, STEPS).unwrap();
        for (dp, cp, tp, pp) in [
            (1, 1, 1, 1),
            (1, 1, 2, 1),
            (1, 1, 1, 2),
            (2, 1, 1, 1),
            (1, 1, 2, 2),
            (1, 2, 1, 1),
            (1, 4, 1, 1),
            (1, 2, 2, 2),
        ] {
            let mut cut = context(layout(packed.clone(), dp, tp, pp), cp);
            cut.parallel.sequence_parallel = tp > 1;
            if pp > 1 && tp > 1 {
                cut = interleave(cut, 2);
            }
            let run = train_on(&data(true, true), &cut, None, STEPS).unwrap();
            let (loss, norm) = differences(&run, &alone);
            println!(
                "{name} {dp}·{cp}·{tp}·{pp}: losses within {loss:.1e}, gradient norms within {norm:.1e}"
            );
            assert!(
                loss < TOLERANCES.0 && norm < TOLERANCES.1,
                "{name} {dp}·{cp}·{tp}·{pp}: {loss:e}, {norm:e}"
            );
            if (dp, cp, tp) == (1, 1, 1) {
                assert_eq!(
                    (run.losses, run.grad_norms),
                    (one.losses.clone(), one.grad_norms.clone()),
                    "{name}: bits"
                );
                assert!(run.last == one.last, "{name}: bits of the state");
            }
        }
    }
}

#[test]
fn without_the_settings_neighbours_are_seen() {
    for (name, change, style) in styles() {
        let (mut alone, mut packed) = (config(style, 12), config(style, 4));
        change(&mut alone);
        change(&mut packed);
        let alone = train_on(&data(false, false), &alone, None, 1).unwrap();
        let run = train_on(&data(true, false), &packed, None, 1).unwrap();
        assert!(differences(&run, &alone).0 > 1e-3, "{name}: {run:?}");
    }
}

#[test]
fn each_setting_does_its_part() {
    let loss = |style, reset_positions, reset_attention| {
        let mut data = data(true, true);
        let ends = DocumentEnds { token: END, mask_loss: true, reset_positions, reset_attention };
        data.document_ends = Some(ends);
        train_on(&data, &config(style, 4), None, 1).unwrap().losses[0]
    };
    for style in [Style::Gpt2, Style::Llama] {
        let all = [(false, false), (true, false), (false, true), (true, true)]
            .map(|(p, a)| loss(style, p, a));
        let apart = |a: f64, b: f64| (a - b).abs() > 1e-4;
        assert!(apart(all[0], all[1]) && apart(all[0], all[2]), "{style:?}: {all:?}");
        // Rotary positions are relative, so the start of a document does not matter within it.
        assert_eq!(apart(all[2], all[3]), style == Style::Gpt2, "{style:?}: {all:?}");
    }
}
