//! CUDA graphs of a microbatch (`enable_cuda_graph`): steps with graphs have the same bits as
//! ordinary steps.
//!
//! It needs a GPU, or stand-ins for NVIDIA's libraries (docs/explanation/gpu-kernels.md):
//! ```text
//! cargo test --release --features cuda --test graphs
//! ```

use candle_core::Device;
use kernels::tensor::device::Choice;
use megatron::config::{
    DynamicLossScale, LossScaling, PositionEmbedding, Precision, Recompute, RecomputeMethod,
    RunConfig,
};
use megatron::data::{DocumentEnds, GlobalBatch, Loader, MicroBatch};
use megatron::train::{Sources, Trainer};
use megatron::{Result, comm};
use models::Gpt;
use system_tests::{Style, Tokens, sources, tiny};

/// Enough for several steps after the third, which is the first with a graph.
const STEPS: usize = 8;

/// Two layers, three microbatches per step, and a learning rate that changes in every step.
fn config(style: Style, precision: Precision) -> RunConfig {
    let mut config = tiny(style, 0.0);
    let model = &mut config.model;
    (model.num_layers, model.hidden_size, model.ffn_hidden_size) = (2, 64, 96);
    (model.num_attention_heads, model.num_query_groups, model.head_dim) = (2, 1, 32);
    (config.optimizer.warmup_samples, config.optimizer.decay_samples) = (6, 24);
    config.training.global_batch_size = 3;
    config.training.train_iters = STEPS as u64;
    config.training.precision = precision;
    config
}

/// Tokens that end documents do not count, and every batch has a different number of them.
fn data(config: &RunConfig) -> Sources {
    let d = &config.data;
    let (reset_positions, reset_attention) = (d.reset_position_ids, d.reset_attention_mask);
    let ends = DocumentEnds { token: 5, mask_loss: true, reset_positions, reset_attention };
    let tokens = Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length);
    Sources { document_ends: Some(ends), ..sources(tokens) }
}

fn trainer(config: &RunConfig, device: &Device) -> Result<Trainer> {
    let model = Gpt::of(config, device)?;
    Trainer::new(config, &model, comm::solo(), &data(config), device)
}

/// The results of a step: bits of loss and gradient norm, its learning rate and loss scale, and
/// whether it was skipped.
type Step = (u64, u64, f64, f64, bool);

/// A run's steps, and those that recorded a graph.
fn train(config: &RunConfig, device: &Device) -> Result<(Vec<Step>, Vec<usize>)> {
    let mut trainer = trainer(config, device)?;
    let batch = GlobalBatch::new(
        config.training.micro_batch_size,
        config.training.global_batch_size,
        0,
        1,
    )?;
    let held_out = Loader::new(data(config).train, batch, config.model.vocab_size, device.clone());
    let (mut steps, mut recorded) = (Vec::new(), Vec::new());
    for i in 1..=STEPS {
        let m = trainer.step()?;
        steps.push((
            m.lm_loss.to_bits(),
            m.grad_norm.to_bits(),
            m.learning_rate,
            m.loss_scale,
            m.skipped,
        ));
        recorded.extend(trainer.take_recorded().map(|_| i));
        if i == 5 {
            trainer.evaluate(&held_out, 0, 1)?;
        }
    }
    Ok((steps, recorded))
}

#[track_caller]
fn the_same_with_graphs(config: &RunConfig) -> Vec<Step> {
    // One device, so that algorithms are chosen only once.
    let device = Choice::Cuda(Some(0)).open(0).unwrap();
    let mut with_graphs = config.clone();
    with_graphs.training.enable_cuda_graph = true;
    // The run with graphs is first, so that the device holds nothing of the run without them or of
    // its evaluation.
    let (graphs, recorded) = train(&with_graphs, &device).unwrap();
    let (plain, none) = train(config, &device).unwrap();
    assert_eq!(graphs, plain);
    assert_eq!((none, recorded), (vec![], vec![3]), "steps that recorded a graph");
    plain
}

/// No value equals that of the step that recorded the graph.
#[track_caller]
fn changes(what: &str, values: impl Iterator<Item = f64>) {
    let values: Vec<f64> = values.collect();
    assert!(
        values[1..].iter().all(|value| *value != values[0]),
        "{what} would not be missed: {values:?}"
    );
}

#[test]
fn learning_rates_and_numbers_of_unmasked_tokens_are_those_of_the_step() {
    let config = config(Style::Gpt2, Precision::Fp32);
    let loader =
        Loader::new(data(&config).train, GlobalBatch::new(1, 3, 0, 1).unwrap(), 101, Device::Cpu);
    let loader = loader.with_documents(data(&config).document_ends);
    let counted =
        |step| loader.microbatches(3 * step).unwrap().iter().map(|batch| batch.counted).sum();
    let counts: Vec<f64> = (2..STEPS as u64).map(counted).collect();
    assert!(
        counts.iter().any(|count| *count != counts[0]),
        "a stale number would not be missed: {counts:?}"
    );
    let steps = the_same_with_graphs(&config);
    changes("a stale learning rate", steps[2..].iter().map(|step| step.2));
}

#[test]
fn loss_scales_are_those_of_the_step() {
    // Doubled after every step without overflow, halved after one with overflow.
    let scale = DynamicLossScale {
        initial: 65536.0,
        window: 1,
        hysteresis: 1,
        ..DynamicLossScale::default()
    };
    let steps =
        the_same_with_graphs(&config(Style::Llama, Precision::Fp16(LossScaling::Dynamic(scale))));
    changes("a stale loss scale", steps[2..].iter().map(|step| step.3));
}

#[test]
fn bf16_and_activations_computed_again_are_the_same() {
    let mut config = config(Style::Llama, Precision::Bf16);
    config.training.recompute = Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 1 };
    the_same_with_graphs(&config);
}

#[test]
fn documents_lie_where_they_do_in_the_microbatch() {
    for style in [Style::Gpt2, Style::Llama] {
        let apart = |reset: bool| {
            let mut config = config(style, Precision::Bf16);
            (config.data.reset_position_ids, config.data.reset_attention_mask) = (reset, reset);
            config
        };
        let batches = Loader::new(
            data(&apart(true)).train,
            GlobalBatch::new(1, 3, 0, 1).unwrap(),
            101,
            Device::Cpu,
        );
        let batches = batches.with_documents(data(&apart(true)).document_ends);
        let tables = |step: u64| {
            let first_keys =
                |batch: MicroBatch| batch.documents.first_keys.unwrap().to_vec2::<u32>().unwrap();
            batches.microbatches(3 * step).unwrap().into_iter().map(first_keys).collect::<Vec<_>>()
        };
        let recorded = tables(2).remove(0);
        let others = (2..STEPS as u64).flat_map(tables).filter(|table| *table != recorded).count();
        assert!(others > 1, "stale tables would not be missed");
        let kept_apart = the_same_with_graphs(&apart(true));
        let device = Choice::Cuda(Some(0)).open(0).unwrap();
        assert_ne!(train(&apart(false), &device).unwrap().0, kept_apart, "nothing was kept apart");
    }
}

#[test]
fn masks_of_dropout_are_those_of_the_step_and_its_samples() {
    let learned = PositionEmbedding::LearnedAbsolute;
    for (precision, positions) in [
        (Precision::Bf16, learned),
        (Precision::Fp32, learned),
        (Precision::Bf16, PositionEmbedding::Alibi),
    ] {
        let mut config = config(Style::Gpt2, precision);
        config.model.position_embedding = positions;
        (config.model.attention_dropout, config.model.hidden_dropout) = (0.3, 0.2);
        config.training.recompute =
            Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 1 };
        let dropped = the_same_with_graphs(&config);
        (config.model.attention_dropout, config.model.hidden_dropout) = (0.0, 0.0);
        let device = Choice::Cuda(Some(0)).open(0).unwrap();
        assert_ne!(train(&config, &device).unwrap().0, dropped, "nothing was dropped");
    }
}

#[test]
fn selective_recompute_is_the_same() {
    let mut config = config(Style::Gpt2, Precision::Bf16);
    config.training.recompute = Recompute::Selective;
    the_same_with_graphs(&config);
}

/// Results are read after the next step is queued, except those of the last step.
#[test]
fn a_gpu_is_a_step_ahead_of_what_is_read() {
    for graphs in [false, true] {
        let mut config = config(Style::Llama, Precision::Bf16);
        config.training.enable_cuda_graph = graphs;
        let device = Choice::Cuda(Some(0)).open(0).unwrap();
        let want = train(&config, &device).unwrap().0;
        let mut trainer = trainer(&config, &device).unwrap();
        let mut steps = Vec::new();
        for i in 1..=STEPS {
            let read = trainer.advance(i == STEPS).unwrap();
            let (first, last) =
                (read.first().map(|m| m.iteration), read.last().map(|m| m.iteration));
            let expected = if i == STEPS { STEPS } else { i - 1 } as u64;
            assert_eq!(
                (first, last),
                if i == 1 { (None, None) } else { (Some(i as u64 - 1), Some(expected)) }
            );
            steps.extend(read.into_iter().map(|m| {
                (
                    m.lm_loss.to_bits(),
                    m.grad_norm.to_bits(),
                    m.learning_rate,
                    m.loss_scale,
                    m.skipped,
                )
            }));
        }
        assert_eq!(steps, want);
    }
}
