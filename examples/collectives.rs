//! Places eight ranks on a tp × dp × pp grid, splits the world into groups, and sums over each
//! group.
//!
//!     cargo run --release --example collectives

use candle_core::{Device, Tensor};
use megatron::Result;
use megatron::comm::{Group, ReduceOp, threads};
use megatron::topology::{ProcessGroups, RankGrid};

fn rank(world: Group) -> Result<String> {
    // tp varies fastest, then dp, then pp: rank = tp + 2·dp + 4·pp.
    let groups = ProcessGroups::new(world, RankGrid::new(2, 1, 1, 2, 2)?)?;
    let mut line = format!("rank {}:", groups.rank);
    for group in [&groups.tp, &groups.replicas, &groups.pp] {
        let sum = Tensor::new(&[groups.rank as f32], &Device::Cpu)?;
        // Collectives run in the background; wait() completes them.
        let work = group.all_reduce(&sum, ReduceOp::Sum)?;
        work.wait()?;
        line += &format!("  {} {:?} → {}", group.name(), group.ranks(), sum.to_vec1::<f32>()?[0]);
    }
    Ok(line)
}

fn main() -> Result<()> {
    for line in threads::run(8, rank)? {
        println!("{line}");
    }
    Ok(())
}
