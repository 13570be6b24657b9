//! Data parallelism around a candle-nn model, like torch's `DistributedDataParallel`: four ranks
//! learn y = sin(x), each from its own samples, and end with the same weights.
//!
//!     cargo run --release --example ddp                    # starts four processes itself
//!     megatron launch --nproc-per-node 2 target/release/examples/ddp
//!     torchrun --no-python --nproc-per-node 2 target/release/examples/ddp

use candle_core::{DType, Device, Tensor};
use candle_nn::{AdamW, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear};
use megatron::Result;
use megatron::comm::{World, spawn};
use megatron::data_parallel::DataParallel;

fn train(world: World) -> Result<()> {
    let (rank, ranks) = (world.group.rank(), world.group.size());
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let (first, second) = (linear(1, 64, vb.pp("first"))?, linear(64, 1, vb.pp("second"))?);
    // Every rank drew its own weights; from here on all ranks have those of rank 0.
    let mut replicas = DataParallel::new(&vars, world.group.clone(), Default::default())?;
    let settings = ParamsAdamW { lr: 1e-2, ..Default::default() };
    let mut optimizer = AdamW::new(replicas.vars(), settings)?;

    let mut loss = f32::NAN;
    for step in 0..300 {
        // This rank's samples of a global batch of 64.
        let count = 64 / ranks;
        let x: Vec<f32> = (0..count)
            .map(|i| ((step * 64 + rank * count + i) * 7919 % 1000) as f32 / 1000.0 * 6.0 - 3.0)
            .collect();
        let x = Tensor::from_vec(x, (count, 1), &Device::Cpu)?;
        let y = second.forward(&first.forward(&x)?.tanh()?)?;
        let error = (y - x.sin()?)?.sqr()?.mean_all()?;
        // Gradients are averaged over ranks.
        optimizer.step(&replicas.backward(&error)?)?;
        loss = error.to_scalar()?;
    }

    let sum: f32 = replicas
        .vars()
        .iter()
        .map(|var| Ok(var.sum_all()?.to_scalar::<f32>()?))
        .sum::<Result<f32>>()?;
    let sums = world.group.all_gather_bytes(&sum.to_le_bytes())?;
    assert!(sums.iter().all(|other| *other == sums[0]), "replicas are equal to the bit");
    assert!(loss < 0.01, "the loss is {loss}");
    if rank == 0 {
        println!("{ranks} ranks, loss {loss:.5}, weights equal on all of them");
    }
    Ok(())
}

fn main() -> Result<()> {
    spawn(4, train)
}
