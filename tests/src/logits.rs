//! Compares logits of a model on any layout with those of another program.

use candle_core::{DType, Device, Tensor};
use megatron::Result;
use megatron::config::RunConfig;
use megatron::data::{Documents, MicroBatch, NamedTensors};
use megatron::pipeline::Payload;
use megatron::tensor_parallel::Phase;
use megatron::tensor_parallel::layout::Stream;
use megatron::train::Trainer;

use crate::{Tokens, on_ranks, sources, trainer};

/// dp · tp · pp
pub const LAYOUTS: [(usize, usize, usize); 4] = [(1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2)];
/// Allowed absolute difference of every logit.
const TOLERANCE: f32 = 1e-4;

/// Logits `[S, V]` of `tokens`, on the last stage.
///
/// # Errors
/// If a kernel or a message fails.
pub fn logits(trainer: &Trainer, tokens: &[u32]) -> Result<Option<Vec<f32>>> {
    let stage = trainer.stage();
    let length = tokens.len();
    let batch = MicroBatch {
        tokens: Tensor::from_vec(tokens.to_vec(), (length, 1), &Device::Cpu)?,
        labels: Tensor::zeros((length, 1), DType::U32, &Device::Cpu)?,
        loss_mask: Tensor::zeros((length, 1), DType::F32, &Device::Cpu)?,
        counted: 0.0,
        samples: vec![0],
        step_and_samples: None,
        documents: Documents::default(),
        named: NamedTensors::default(),
    };
    let ctx = stage.ctx(&batch, Phase::Evaluate, None);
    let rank = stage.pp.rank();
    // The layers' forward, as in training.
    let chunk = &stage.chunks[0];
    let mut x = match &chunk.input {
        Some(embedding) => embedding.forward(&ctx)?.0,
        None => {
            let buffer = Tensor::zeros((length, 1, stage.hidden), DType::F32, &Device::Cpu)?;
            stage.pp.recv(&buffer, rank - 1, Payload::Activation.tag())?.wait()?;
            Stream(buffer)
        }
    };
    for layer in &chunk.layers {
        x = layer.forward(x, &ctx)?.0;
    }
    let Some(head) = &chunk.output else {
        stage.pp.send(&x.0, rank + 1, Payload::Activation.tag())?.wait()?;
        return Ok(None);
    };
    let rows = (0..length)
        .map(|row| Ok(head.logits_at(&x, &[row], &ctx)?.flatten_all()?.to_vec1::<f32>()?));
    Ok(Some(rows.collect::<Result<Vec<_>>>()?.concat()))
}

fn assert_close(what: &str, ours: &[f32], theirs: &[f32]) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    let worst = ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    println!("{what}: logits within {worst:.1e}");
    assert!(worst < TOLERANCE, "{what}: a logit differs by {worst}");
}

/// Asserts that the model of `config`, whose weights `load` fills, has the logits `expected` for
/// `tokens`.
pub fn assert_logits(
    what: &str,
    config: &RunConfig,
    tokens: &[u32],
    expected: &[f32],
    load: &(impl Fn(&mut Trainer) -> Result<()> + Sync),
) {
    let data = sources(Tokens::synthetic(config.model.vocab_size as u32, tokens.len()));
    let all = on_ranks(config.parallel.world_size(), |world| {
        let mut trainer = trainer(config, world, &data)?;
        load(&mut trainer)?;
        logits(&trainer, tokens)
    })
    .unwrap();
    assert!(all.iter().flatten().count() > 0);
    for ours in all.iter().flatten() {
        assert_close(what, ours, expected);
    }
}
