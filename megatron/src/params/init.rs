//! Initial values: a function of (seed, parameter name, global element index), so that every layout
//! starts from bitwise the same values.
//!
//! Source of the distribution: Radford et al. 2019 (N(0, 0.02), output projections scaled by
//! 1/√(2·layers)).

use kernels::tensor::philox::{fill_normal, fill_uniform, stream_id};

use super::{Init, ParamSpec, Piece};

/// The initial values of the share of tp rank `rank` of `tp`, in fp32, row-major. Padding rows are
/// zero.
pub fn initial_values(spec: &ParamSpec, rank: usize, tp: usize, seed: u64) -> Vec<f32> {
    let numel = spec.local_shape(tp).iter().product();
    initial_values_of(spec, &spec.pieces(rank, tp), numel, seed)
}

/// As [`initial_values`], for a share of `numel` elements that consists of `pieces`.
pub fn initial_values_of(spec: &ParamSpec, pieces: &[Piece], numel: usize, seed: u64) -> Vec<f32> {
    let mut values = vec![0f32; numel];
    let stream = stream_id(&spec.name);
    for piece in pieces {
        // Each run is contiguous in the global tensor: it covers all dimensions after the split
        // dimension.
        let mut draw = |fill: &dyn Fn(&mut [f32], u64)| {
            for_each_run(&spec.shape, &piece.offset, &piece.shape, |global, local, len| {
                let start = piece.local + local;
                fill(&mut values[start..start + len], global);
            });
        };
        match spec.init {
            Init::Zeros => {}
            Init::Ones => draw(&|out, _| out.fill(1.0)),
            Init::Constant { value } => draw(&|out, _| out.fill(value as f32)),
            Init::Uniform { low, high } => {
                draw(&|out, first| fill_uniform(out, seed, stream, first, low..high));
            }
            Init::Normal { std } => {
                draw(&|out, first| fill_normal(out, seed, stream, first, std));
            }
        }
    }
    values
}

/// Calls `f(global index, index in the box, length)` for every run of a box that is contiguous in
/// the global tensor.
fn for_each_run(
    global: &[usize],
    offset: &[usize],
    extent: &[usize],
    mut f: impl FnMut(u64, usize, usize),
) {
    let rank = global.len();
    // Trailing dimensions that the box covers completely are joined into one run. `axis` is the
    // first dimension of the run.
    let mut axis = rank.saturating_sub(1);
    while axis > 0 && extent[axis] == global[axis] {
        axis -= 1;
    }
    let run: usize = extent[axis..].iter().product();
    let rows: usize = extent[..axis].iter().product();
    let mut index = vec![0usize; axis];
    for row in 0..rows {
        let mut flat = 0u64;
        for d in 0..rank {
            let i = offset[d] + index.get(d).copied().unwrap_or(0);
            flat = flat * global[d] as u64 + i as u64;
        }
        f(flat, row * run, run);
        for d in (0..axis).rev() {
            index[d] += 1;
            if index[d] < extent[d] {
                break;
            }
            index[d] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Partition;

    fn spec(shape: &[usize], partition: Partition, padded: usize) -> ParamSpec {
        ParamSpec {
            name: "w".into(),
            shape: shape.to_vec(),
            partition,
            padded_dim0: padded,
            init: Init::Normal { std: 0.02 },
            weight_decay: true,
            tie_group: None,
            grad_partial_over_tp: false,
        }
    }

    /// Reassembles the global tensor from the shares of all tp ranks.
    fn assemble(spec: &ParamSpec, tp: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; spec.shape.iter().product()];
        for rank in 0..tp {
            let values = initial_values(spec, rank, tp, 7);
            for piece in spec.pieces(rank, tp) {
                for_each_run(&spec.shape, &piece.offset, &piece.shape, |global, local, len| {
                    let at = piece.local + local;
                    out[global as usize..global as usize + len]
                        .copy_from_slice(&values[at..at + len]);
                });
            }
        }
        out
    }

    #[test]
    fn initial_values_do_not_depend_on_the_cut() {
        for (shape, partition, padded) in [
            (vec![24, 10], Partition::Replicated, 24),
            (vec![24, 10], Partition::Split { dim: 0, parts: 1 }, 24),
            (vec![24, 10], Partition::Split { dim: 0, parts: 2 }, 24),
            (vec![6, 24], Partition::Split { dim: 1, parts: 1 }, 6),
            (vec![21, 10], Partition::Split { dim: 0, parts: 1 }, 24),
            (vec![24], Partition::Split { dim: 0, parts: 1 }, 24),
        ] {
            let spec = spec(&shape, partition, padded);
            let whole = assemble(&spec, 1);
            assert!(whole.iter().all(|v| v.is_finite()));
            for tp in [2, 4] {
                assert_eq!(whole, assemble(&spec, tp), "{shape:?} {partition:?} tp {tp}");
            }
        }
    }

    #[test]
    fn uniform_values_fill_their_range_and_do_not_depend_on_the_cut() {
        let mut spec = spec(&[64, 50], Partition::Split { dim: 1, parts: 1 }, 64);
        spec.init = Init::Uniform { low: -0.5, high: 1.5 };
        let whole = assemble(&spec, 1);
        assert_eq!(whole, assemble(&spec, 2));
        let mean = whole.iter().sum::<f32>() / whole.len() as f32;
        let (low, high) = whole.iter().fold((2f32, -2f32), |(l, h), &v| (l.min(v), h.max(v)));
        assert!((mean - 0.5).abs() < 0.05, "{mean}");
        assert!((-0.5..-0.49).contains(&low) && (1.49..=1.5).contains(&high), "{low} {high}");
    }

    #[test]
    fn padding_rows_are_zero() {
        let spec = spec(&[5, 3], Partition::Split { dim: 0, parts: 1 }, 8);
        let last = initial_values(&spec, 1, 2, 7);
        assert_eq!(last.len(), 12);
        assert!(last[3..].iter().all(|&v| v == 0.0) && last[0] != 0.0);
    }
}
