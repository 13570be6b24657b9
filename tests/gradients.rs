//! Compares gradients of whole models with finite differences in f64, in one process and on other
//! layouts.

use megatron::config::{
    PositionEmbedding, Precision, Recompute, RecomputeMethod, RopeScaling, RunConfig, SlidingWindow,
};
use megatron::data::{DocumentEnds, GlobalBatch, Loader, SampleSource};
use megatron::data_parallel::GradientReducer;
use megatron::params::{ParamStore, Role};
use megatron::pipeline::{GradientListener, forward_only, generate};
use megatron::tensor_parallel::Phase;
use megatron::topology::ReplicaGroups;
use megatron::train::Trainer;
use std::sync::Arc;
use system_tests::{Style, Tokens, context, interleave, layout, on_ranks, sources, tiny, trainer};

struct Ignore;

impl GradientListener for Ignore {
    fn ready(&mut self, _: &[megatron::params::ParamId], _: &ParamStore) -> megatron::Result<()> {
        Ok(())
    }
}

/// Mean loss of the first global batch, with dropout as in training.
fn loss(trainer: &Trainer, config: &RunConfig, loader: &Loader) -> megatron::Result<f64> {
    let p = &config.parallel;
    let batches = loader.microbatches(0)?;
    let schedule =
        forward_only(p.pipeline_model_parallel_size, p.virtual_pipeline_size, batches.len())?;
    // Dropout masks are a function of the step, so evaluating in the training phase repeats them.
    // The schedule has no backward, so the activations of forward are dropped.
    let sum = trainer
        .stage()
        .run(&schedule, &batches, Phase::Train { step: 3 }, 0.0, &mut Ignore)?
        .sum()?;
    let groups = trainer.groups();
    let mine = if groups.tp.rank() == 0 { sum } else { 0.0 };
    let total = candle_core::Tensor::from_vec(vec![mine], 1, &candle_core::Device::Cpu)?;
    groups.world.all_reduce(&total, megatron::comm::ReduceOp::Sum)?.wait()?;
    let tokens = config.training.global_batch_size * config.model.seq_length;
    Ok(total.to_vec1::<f64>()?[0] / tokens as f64)
}

fn check(config: RunConfig) {
    check_with(config, None);
}

fn check_with(config: RunConfig, ends: Option<DocumentEnds>) {
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, config.model.seq_length));
    let source: Arc<dyn SampleSource> = data.train.clone();
    on_ranks(config.parallel.world_size(), |world| {
        let trainer = trainer(&config, world, &data)?;
        let (groups, stage) = (trainer.groups(), trainer.stage());
        let t = &config.training;
        let batch = GlobalBatch::new(
            t.micro_batch_size,
            t.global_batch_size,
            groups.dp_rank(),
            groups.dp_size(),
        )?;
        let loader =
            Loader::new(source.clone(), batch, config.model.vocab_size, candle_core::Device::Cpu);
        let loader =
            loader.with_documents(ends).with_part_of_sequences(groups.cp.rank(), groups.cp.size());
        let batches = loader.microbatches(0)?;
        let p = &config.parallel;
        let schedule = generate(
            p.schedule,
            p.pipeline_model_parallel_size,
            p.virtual_pipeline_size,
            batches.len(),
            p.extra_warmup,
        )?;
        let embedding =
            groups.embedding.clone().filter(|_| !config.model.untie_embeddings_and_output_weights);
        let mut reducer = GradientReducer::new(
            groups.tp.clone(),
            ReplicaGroups::whole(groups.replicas.clone()),
            embedding,
            true,
        );
        let factor = 1.0 / (t.global_batch_size * config.model.seq_length) as f64;
        reducer.begin(&stage.params)?;
        stage.run(&schedule, &batches, Phase::Train { step: 3 }, factor, &mut reducer)?;
        reducer.finish(&stage.params)?;

        // The direction for every rank's own parameters. Copies of a tied or replicated weight must
        // move equally, so the direction is a function of the logical element.
        let mut along = 0f64;
        let mut moves = Vec::new();
        for (id, param) in stage.params.iter().filter(|(_, p)| !matches!(p.role, Role::TiedUse(_)))
        {
            let shape = param.shape.clone();
            let mut direction = vec![0f64; param.numel];
            for piece in &param.pieces {
                for (n, flat) in piece.flat.clone().enumerate() {
                    let mut rest = flat;
                    let mut global = 0usize;
                    let mut stride = 1;
                    for d in (0..param.spec.shape.len()).rev() {
                        global += (piece.offset[d] + rest % piece.shape[d]) * stride;
                        rest /= piece.shape[d];
                        stride *= param.spec.shape[d];
                    }
                    let hash =
                        global.wrapping_mul(0x9E37_79B9).wrapping_add(param.spec.name.len() * 7919)
                            % 1000;
                    direction[piece.local + n] = hash as f64 / 500.0 - 1.0;
                }
            }
            let grad = stage.params.grad(id)?.flatten_all()?.to_vec1::<f64>()?;
            // Counts every logical element once over the world.
            let replicated = param.spec.partition == megatron::params::Partition::Replicated;
            let first = groups.replicas.rank() == 0 && (!replicated || groups.tp.rank() == 0);
            let counts = param.role == Role::Primary && first;
            if counts {
                along += grad.iter().zip(&direction).map(|(g, d)| g * d).sum::<f64>();
            }
            let direction =
                candle_core::Tensor::from_vec(direction, shape, &candle_core::Device::Cpu)?;
            moves.push((stage.params.weight(id)?, direction));
        }
        let along = candle_core::Tensor::from_vec(vec![along], 1, &candle_core::Device::Cpu)?;
        groups.world.all_reduce(&along, megatron::comm::ReduceOp::Sum)?.wait()?;
        let analytic = along.to_vec1::<f64>()?[0];

        let step = |by: f64| -> megatron::Result<()> {
            for (weight, direction) in &moves {
                kernels::ops::reduce::add_inplace(weight, &direction.affine(by, 0.0)?)?;
            }
            Ok(())
        };
        let h = 1e-6;
        step(h)?;
        let up = loss(&trainer, &config, &loader)?;
        step(-2.0 * h)?;
        let down = loss(&trainer, &config, &loader)?;
        let numeric = (up - down) / (2.0 * h);
        let difference = ((analytic - numeric) / numeric).abs();
        assert!(
            difference < 1e-6,
            "{:?}: gradient along a direction {analytic}, by differences {numeric}",
            p
        );
        Ok(())
    })
    .unwrap();
}

/// Small enough for f64, with initial weights large enough for every path to matter.
fn model(style: Style) -> RunConfig {
    let mut config = tiny(style, 0.1);
    config.model.num_layers = 4;
    config.model.init_method_std = 0.2;
    config.training.precision = Precision::Fp64;
    config.training.global_batch_size = 4;
    config
}

#[test]
fn single_process() {
    check(model(Style::Gpt2));
    check(model(Style::Llama));
}

#[test]
fn tensor_sequence_and_interleaved_pipeline_parallel() {
    for style in [Style::Gpt2, Style::Llama] {
        let mut config = interleave(layout(model(style), 1, 2, 2), 2);
        config.parallel.sequence_parallel = true;
        check(config);
    }
}

#[test]
fn data_parallel_with_recompute() {
    for style in [Style::Gpt2, Style::Llama] {
        let mut config = layout(model(style), 2, 2, 1);
        config.training.recompute =
            Recompute::Full { method: RecomputeMethod::Uniform, num_layers: 2 };
        check(config.clone());
        config.training.recompute = Recompute::Selective;
        check(config);
    }
}

#[test]
fn context_parallel_alone_and_within_all_others() {
    for style in [Style::Gpt2, Style::Llama] {
        check(context(model(style), 4));
        let mut config = context(layout(model(style), 2, 2, 2), 2);
        config.parallel.sequence_parallel = true;
        config.training.recompute = Recompute::Selective;
        check(config);
    }
}

#[test]
fn linear_biases_scaled_rotations_and_a_normalized_embedding() {
    let mut bloom = model(Style::Gpt2);
    bloom.model.position_embedding = PositionEmbedding::Alibi;
    bloom.model.embed_layernorm = true;
    let mut llama = model(Style::Llama);
    llama.model.rope_scaling = RopeScaling::Linear { factor: 4.0 };
    llama.model.qkv_bias = true;
    for config in [bloom, llama] {
        check(config.clone());
        let mut config = context(layout(config, 1, 2, 2), 2);
        config.parallel.sequence_parallel = true;
        check(config);
    }
}

#[test]
fn documents_apart_and_a_sliding_window() {
    for style in [Style::Gpt2, Style::Llama] {
        let mut config = model(style);
        config.model.sliding_window = Some(SlidingWindow { size: 5, full_layers: vec![2] });
        // A token of the synthetic text that occurs about once per sample.
        let ends = DocumentEnds {
            token: 3,
            mask_loss: false,
            reset_positions: true,
            reset_attention: true,
        };
        check_with(config.clone(), Some(ends));
        let mut config = context(layout(config, 1, 2, 2), 2);
        config.parallel.sequence_parallel = true;
        check_with(config, Some(ends));
    }
}

/// Covers logits and gradients with rows that are padded in memory (`tensor_parallel::head`).
#[test]
fn a_vocabulary_whose_rows_of_logits_are_whole_pages() {
    let mut config = model(Style::Gpt2);
    config.model.make_vocab_size_divisible_by = 512;
    check(config.clone());
    check(layout(config, 1, 2, 1));
}
