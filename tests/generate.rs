//! Generation: the same tokens with and without the cache, alone and in a batch, on any layout.

use megatron::config::{RunConfig, SlidingWindow};
use megatron::train::{Length, Sampling, Trainer};
use system_tests::{Style, Tokens, interleave, layout, on_ranks, sources, tiny, trainer};

const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 1 };
const DRAWN: Sampling = Sampling { temperature: 1.0, top_k: 20, top_p: 0.95, seed: 1 };
const LENGTH: Length = Length { tokens: 8, window: 16, ends: Vec::new(), absent: Vec::new() };

fn prompts() -> Vec<Vec<u32>> {
    vec![vec![5, 38, 67], vec![9], vec![1, 10, 73, 9, 66, 61]]
}

fn generate(
    trainer: &Trainer,
    prompts: &[Vec<u32>],
    length: &Length,
    sampling: &Sampling,
) -> Vec<Vec<u32>> {
    let mut heard = vec![Vec::new(); prompts.len()];
    let new = trainer
        .stage()
        .generate(prompts, length, sampling, &mut |sample, token| heard[sample].push(token))
        .unwrap();
    assert_eq!(new, heard);
    new
}

/// The results of `body` on every rank of a model that was trained for a few steps.
fn after_training<T: Send>(config: &RunConfig, body: impl Fn(&Trainer) -> T + Sync) -> Vec<T> {
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    on_ranks(config.parallel.world_size(), |world| {
        let mut trainer = trainer(config, world, &data)?;
        for _ in 0..10 {
            trainer.step()?;
        }
        Ok(body(&trainer))
    })
    .unwrap()
}

#[test]
fn the_cache_changes_no_token() {
    let window = Some(SlidingWindow { size: 3, full_layers: vec![2] });
    for (style, sliding_window) in
        [(Style::Gpt2, None), (Style::Llama, None), (Style::Llama, window)]
    {
        let mut config = tiny(style, 0.0);
        config.model.sliding_window = sliding_window;
        after_training(&config, |trainer| {
            for prompt in prompts() {
                let cached =
                    generate(trainer, std::slice::from_ref(&prompt), &LENGTH, &GREEDY).remove(0);
                let mut grown = prompt;
                for token in cached {
                    let next = generate(
                        trainer,
                        &[grown.clone()],
                        &Length { tokens: 1, ..LENGTH },
                        &GREEDY,
                    );
                    assert_eq!(next, [[token]], "{style:?} after {grown:?}");
                    grown.push(token);
                }
            }
        });
    }
}

#[test]
fn a_batch_gives_what_each_prompt_gives_alone() {
    after_training(&tiny(Style::Llama, 0.0), |trainer| {
        let together = generate(trainer, &prompts(), &LENGTH, &GREEDY);
        for (prompt, expected) in prompts().into_iter().zip(together) {
            assert_eq!(generate(trainer, &[prompt], &LENGTH, &GREEDY), [expected]);
        }
    });
}

#[test]
fn every_layout_gives_the_same_tokens() {
    for style in [Style::Gpt2, Style::Llama] {
        let tokens = |config: &RunConfig| {
            let ranks = after_training(config, |trainer| {
                [GREEDY, DRAWN].map(|sampling| generate(trainer, &prompts(), &LENGTH, &sampling))
            });
            assert!(ranks.iter().all(|tokens| *tokens == ranks[0]), "ranks disagree");
            ranks[0].clone()
        };
        let alone = tokens(&tiny(style, 0.0));
        for (dp, tp, pp) in [(1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1)] {
            let mut config = layout(tiny(style, 0.0), dp, tp, pp);
            assert_eq!(tokens(&config), alone, "{style:?} {dp}·{tp}·{pp}");
            config.parallel.sequence_parallel = tp > 1;
            if pp > 1 {
                config = interleave(config, 2);
            }
            assert_eq!(tokens(&config), alone, "{style:?} {dp}·{tp}·{pp} sp, interleaved");
        }
    }
}

#[test]
fn a_continuation_ends_at_its_end_token_and_at_the_window() {
    after_training(&tiny(Style::Gpt2, 0.0), |trainer| {
        let prompt = [vec![5, 38, 67]];
        let free = generate(trainer, &prompt, &LENGTH, &GREEDY).remove(0);
        let first = free.iter().position(|t| *t == free[2]).unwrap();
        // The first of several end tokens ends it.
        for ends in [vec![free[2]], vec![1000, free[2]], vec![free[2], 1000]] {
            let ended = generate(trainer, &prompt, &Length { ends, ..LENGTH }, &GREEDY).remove(0);
            assert_eq!(ended, free[..first]);
        }
        // An absent token, here the likeliest one, is never drawn, and another token follows
        // instead.
        let absent: Vec<_> = std::iter::once(free[0] as usize..free[0] as usize + 1).collect();
        let others = generate(trainer, &prompt, &Length { absent, ..LENGTH }, &GREEDY).remove(0);
        assert!(others.len() == free.len() && !others.contains(&free[0]), "{others:?}");
        let windowed =
            generate(trainer, &prompt, &Length { tokens: 100, ..LENGTH }, &GREEDY).remove(0);
        assert_eq!(windowed.len(), 13);
        let long = vec![vec![1; 16]];
        let error = trainer
            .stage()
            .generate(&long, &LENGTH, &GREEDY, &mut |_, _| {})
            .unwrap_err()
            .to_string();
        assert!(error.contains("16 tokens"), "{error}");
    });
}
