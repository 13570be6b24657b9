//! Distributes layers over virtual stages.
//!
//! The uniform rule is DeepSpeed's `partition_uniform`: ⌊n/p⌋ layers each, and one more on each of
//! the first n mod p stages. The rule by types is that of its `PipelineModule` with
//! `partition_method="type:REGEX"`, and of its `partition_balanced`.

use std::ops::Range;

use crate::config::PartitionMethod;
use crate::{Error, Result};

/// The layers of each virtual stage, in the order of the model (chunk c of stage p is virtual stage
/// c·pp + p).
///
/// `layer_weights` are the parameters (or operations, or matches of a type) of each layer.
/// `first_extra` and `last_extra` are those of the embedding and of the final norm and head, which
/// are added to the first and last virtual stage.
///
/// By parameters or operations, the largest sum of a stage is minimal. Among such splits the least
/// sum of squares wins, and among equal ones the latest split, i.e. more layers on earlier stages.
/// By types, the largest and the smallest sum of a stage differ as little as possible.
/// Only an explicit list and types may leave a stage empty.
///
/// # Errors
/// If there are fewer layers than virtual stages, or an explicit list has another length or sum.
pub fn partition(
    method: &PartitionMethod,
    layer_weights: &[u64],
    first_extra: u64,
    last_extra: u64,
    num_virtual_stages: usize,
) -> Result<Vec<Range<usize>>> {
    let (n, p) = (layer_weights.len(), num_virtual_stages);
    if p == 0 {
        return Err(Error::config(
            "layers cannot be distributed over 0 virtual stages; pp·v must be at least 1",
        ));
    }
    if let PartitionMethod::Explicit(counts) = method {
        return explicit(counts, n, p);
    }
    if n < p {
        return Err(Error::config(format!(
            "{n} layers are fewer than the {p} virtual stages (pp·v); use a smaller pp or v, more \
             layers, or an explicit pipeline-partition with zeros"
        )));
    }
    match method {
        PartitionMethod::Parameters | PartitionMethod::Flops => {
            Ok(balanced(layer_weights, first_extra, last_extra, p))
        }
        PartitionMethod::Type(_) => {
            // The ends are layers of DeepSpeed's, and every stage has one of its layers.
            let all = [&[first_extra], layer_weights, &[last_extra]].concat();
            let mut starts = alike(&all, p);
            starts.iter_mut().skip(1).for_each(|start| *start -= 1);
            let end = |stage: usize| starts.get(stage + 1).copied().unwrap_or(n);
            Ok((0..p).map(|stage| starts[stage]..end(stage)).collect())
        }
        _ => Ok(ranges((0..p).map(|stage| n / p + usize::from(stage < n % p)))),
    }
}

fn explicit(counts: &[usize], n: usize, p: usize) -> Result<Vec<Range<usize>>> {
    if counts.len() != p {
        return Err(Error::config(format!(
            "pipeline-partition {counts:?} has {} entries, but there are pp·v = {p} virtual \
             stages; give one number per virtual stage",
            counts.len()
        )));
    }
    let sum = counts.iter().fold(0usize, |sum, &count| sum.saturating_add(count));
    if sum != n {
        let terms = counts.iter().map(ToString::to_string).collect::<Vec<_>>().join(" + ");
        return Err(Error::config(format!(
            "pipeline-partition {terms} = {sum}, but the model has num-layers = {n}; make the sum {n}"
        )));
    }
    Ok(ranges(counts.iter().copied()))
}

fn ranges(counts: impl Iterator<Item = usize>) -> Vec<Range<usize>> {
    counts
        .scan(0, |start, count| {
            let range = *start..*start + count;
            *start = range.end;
            Some(range)
        })
        .collect()
}

/// How many of the names of each layer's types match `pattern`; and 1 or 0 of the input and the
/// output.
///
/// # Errors
/// If nothing matches: the message lists the types. If `pattern` is no regular expression.
pub(crate) fn matches_of_types(
    pattern: &str,
    layers: &[Vec<&'static str>],
    input: Option<&'static str>,
    output: Option<&'static str>,
) -> Result<(Vec<u64>, (u64, u64))> {
    let regex = crate::config::type_regex(pattern).map_err(|why| {
        Error::config(format!("pipeline-partition type:{pattern} is no regular expression: {why}"))
    })?;
    let is_match = |name: &&str| u64::from(regex.is_match(name));
    let of_layers: Vec<u64> = layers.iter().map(|names| names.iter().map(is_match).sum()).collect();
    let [first, last] = [input, output].map(|end| end.as_ref().map_or(0, is_match));
    if of_layers.iter().sum::<u64>() + first + last == 0 {
        let all = input.iter().chain(layers.iter().flatten()).chain(&output);
        let mut types: Vec<&str> = Vec::new();
        for name in all {
            if !types.contains(name) {
                types.push(name);
            }
        }
        return Err(Error::config(format!(
            "pipeline-partition type:{pattern} matches no type of this model; its types are {}",
            types.join(", ")
        )));
    }
    Ok((of_layers, (first, last)))
}

/// Splits the elements into p < n non-empty runs whose sums differ as little as possible: every
/// prefix in its best split, and among equal splits the latest. Returns the first element of each
/// run.
fn alike(weights: &[u64], p: usize) -> Vec<usize> {
    let n = weights.len();
    let mut before = vec![0; n + 1]; // the sum of the elements before i
    for (i, weight) in weights.iter().enumerate() {
        before[i + 1] = before[i] + weight;
    }
    // best[i]: largest and smallest sum of the runs so far over the first i elements.
    let mut best: Vec<Option<(u64, u64)>> = vec![None; n + 1];
    best[0] = Some((0, u64::MAX));
    let mut cuts = Vec::with_capacity(p);
    for _ in 0..p {
        let mut next: Vec<Option<(u64, u64)>> = vec![None; n + 1];
        let mut cut = vec![0; n + 1];
        for i in 1..=n {
            for start in 0..i {
                let Some((most, least)) = best[start] else { continue };
                let run = before[i] - before[start];
                let (most, least) = (most.max(run), least.min(run));
                if next[i].is_none_or(|(top, low)| most - least <= top - low) {
                    (next[i], cut[i]) = (Some((most, least)), start);
                }
            }
        }
        best = next;
        cuts.push(cut);
    }
    let mut starts = vec![0; p];
    let mut end = n;
    for (start, cut) in starts.iter_mut().zip(&cuts).rev() {
        *start = cut[end];
        end = *start;
    }
    starts
}

/// At least one layer each. Minimizes the largest stage, then the sum of squares, then takes the
/// latest split.
fn balanced(
    layer_weights: &[u64],
    first_extra: u64,
    last_extra: u64,
    p: usize,
) -> Vec<Range<usize>> {
    let n = layer_weights.len();
    let mut before = vec![0u128; n + 1]; // parameters of the layers before i
    for (i, &params) in layer_weights.iter().enumerate() {
        before[i + 1] = before[i] + u128::from(params);
    }
    let weight = |stage: usize, layers: Range<usize>| {
        let first = if stage == 0 { first_extra } else { 0 };
        let last = if stage + 1 == p { last_extra } else { 0 };
        before[layers.end] - before[layers.start] + u128::from(first) + u128::from(last)
    };
    let smallest_largest = best_splits(n, p, weight, u128::max).0;
    let squares = |stage: usize, layers: Range<usize>| {
        let weight = weight(stage, layers);
        if weight <= smallest_largest { weight.saturating_mul(weight) } else { u128::MAX }
    };
    let starts = best_splits(n, p, squares, u128::saturating_add).1;
    (0..p).map(|stage| starts[stage]..starts.get(stage + 1).copied().unwrap_or(n)).collect()
}

/// Splits n ≥ p layers into p non-empty runs with the least value of `combine` over the runs'
/// costs, by dynamic programming over prefixes. Returns that value and the first layer of each run.
/// Among equal splits it takes the latest.
fn best_splits(
    n: usize,
    p: usize,
    cost: impl Fn(usize, Range<usize>) -> u128,
    combine: impl Fn(u128, u128) -> u128,
) -> (u128, Vec<usize>) {
    // best[i]: least value of the runs so far over the first i layers. cuts[stage - 1][i]: first
    // layer of the last of these runs.
    let mut best: Vec<u128> =
        (0..=n).map(|i| if i == 0 { u128::MAX } else { cost(0, 0..i) }).collect();
    let mut cuts = Vec::with_capacity(p);
    for stage in 1..p {
        let mut next = vec![u128::MAX; n + 1];
        let mut cut = vec![stage; n + 1];
        for i in stage + 1..=n {
            for start in stage..i {
                let value = combine(best[start], cost(stage, start..i));
                if value <= next[i] {
                    (next[i], cut[i]) = (value, start);
                }
            }
        }
        best = next;
        cuts.push(cut);
    }
    let mut starts = vec![0; p];
    let mut end = n;
    for stage in (1..p).rev() {
        starts[stage] = cuts[stage - 1][end];
        end = starts[stage];
    }
    (best[n], starts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(
        method: PartitionMethod,
        layers: &[u64],
        first: u64,
        last: u64,
        p: usize,
    ) -> Vec<usize> {
        let parts = partition(&method, layers, first, last, p).unwrap();
        assert_eq!((parts[0].start, parts[p - 1].end), (0, layers.len()));
        assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start), "{parts:?}");
        parts.iter().map(ExactSizeIterator::len).collect()
    }

    fn refused(method: PartitionMethod, n: usize, p: usize) -> String {
        partition(&method, &vec![1; n], 0, 0, p).expect_err("must be refused").to_string()
    }

    #[test]
    fn uniform_gives_the_remainder_to_the_first_stages() {
        assert_eq!(counts(PartitionMethod::Uniform, &[1; 10], 99, 99, 4), [3, 3, 2, 2]);
        assert_eq!(counts(PartitionMethod::Uniform, &[1; 8], 0, 0, 4), [2, 2, 2, 2]);
    }

    #[test]
    fn by_parameters_counts_embedding_and_head() {
        // The embedding and the head each weigh as much as two layers: 2+1, 3, 3, 1+2.
        assert_eq!(counts(PartitionMethod::Parameters, &[10; 8], 20, 20, 4), [1, 3, 3, 1]);
        assert_eq!(counts(PartitionMethod::Parameters, &[10; 6], 0, 30, 3), [3, 2, 1]);
    }

    #[test]
    fn by_operations_the_head_is_weighed_against_layers() {
        // `small`: a layer has 1.87 million multiplications per token, the head 3.15 million.
        let (layer, head) = (4 * 384 * 384 + 2 * 384 * 1536 + 256 * 384, 384 * 8192);
        let parts = partition(&PartitionMethod::Flops, &[layer; 6], 0, head, 2).unwrap();
        assert_eq!(parts, [0..4, 4..6]);
    }

    #[test]
    fn by_parameters_equal_layers_are_dealt_as_uniform() {
        for p in 1..=8 {
            let uniform = counts(PartitionMethod::Uniform, &[7; 11], 0, 0, p);
            assert_eq!(counts(PartitionMethod::Parameters, &[7; 11], 0, 0, p), uniform);
        }
    }

    #[test]
    fn a_stage_that_is_large_anyway_does_not_unbalance_the_rest() {
        assert_eq!(counts(PartitionMethod::Parameters, &[1; 7], 100, 0, 4), [1, 2, 2, 2]);
    }

    #[test]
    fn by_parameters_the_largest_stage_is_the_smallest_possible() {
        let layers = [5, 1, 4, 9, 2, 6, 3, 8];
        let (first, last) = (4, 7);
        for p in 2..=5 {
            let heaviest = |starts: &[usize]| {
                let stage = |i: usize| {
                    let end = starts.get(i + 1).copied().unwrap_or(layers.len());
                    let extra = if i == 0 { first } else { 0 } + if i + 1 == p { last } else { 0 };
                    layers[starts[i]..end].iter().sum::<u64>() + extra
                };
                (0..p).map(stage).max().unwrap()
            };
            // All choices of p − 1 of the 7 inner boundaries.
            let least = (0u32..1 << 7)
                .filter(|bits| bits.count_ones() as usize == p - 1)
                .map(|bits| {
                    [0].into_iter()
                        .chain((1..8).filter(|i| bits >> (i - 1) & 1 == 1))
                        .collect::<Vec<_>>()
                })
                .map(|starts| heaviest(&starts))
                .min();
            let parts = partition(&PartitionMethod::Parameters, &layers, first, last, p).unwrap();
            let starts: Vec<_> = parts.iter().map(|range| range.start).collect();
            assert_eq!(Some(heaviest(&starts)), least, "p = {p}: {parts:?}");
        }
    }

    /// Splits of the same layers by DeepSpeed's `partition_balanced`, with an input and an output
    /// around them.
    #[test]
    fn by_types_layers_are_dealt_as_deepspeed_deals_them() {
        let of = |layers: &[u64], first, last, p| {
            counts(PartitionMethod::Type("x".into()), layers, first, last, p)
        };
        assert_eq!(of(&[1; 8], 0, 0, 4), [2, 2, 2, 2]);
        assert_eq!(of(&[1; 10], 0, 0, 4), [3, 3, 2, 2]);
        assert_eq!(of(&[1; 7], 0, 0, 3), [3, 2, 2]);
        assert_eq!(of(&[1; 10], 1, 1, 4), [2, 3, 3, 2]);
        assert_eq!(of(&[1; 6], 1, 0, 2), [3, 3]);
        assert_eq!(of(&[1, 0, 1, 0, 1, 0, 0, 1, 1], 0, 0, 3), [4, 4, 1]);
        assert_eq!(of(&[0, 0, 0, 0], 1, 0, 2), [4, 0]);
        assert_eq!(of(&[0, 1, 1, 0, 0, 0, 1], 0, 1, 4), [2, 4, 1, 0]);
        assert_eq!(of(&[1, 1, 1], 0, 0, 1), [3]);
    }

    #[test]
    fn types_match_anywhere_in_any_case_or_are_listed() {
        let layers = [vec!["TransformerLayer", "AutogradLayer"], vec!["TransformerLayer"]];
        let of = |pattern: &str| {
            matches_of_types(pattern, &layers, Some("Embedding"), Some("Head"))
                .map_err(|error| error.to_string())
        };
        assert_eq!(of("transformer").unwrap(), (vec![1, 1], (0, 0)));
        assert_eq!(of("transformer|EMBEDDING").unwrap(), (vec![1, 1], (1, 0)));
        assert_eq!(of("LAYER$|^head").unwrap(), (vec![2, 1], (0, 1)));
        assert_eq!(
            of("mlp|^layer").unwrap_err(),
            "pipeline-partition type:mlp|^layer matches no type of this model; its types are \
             Embedding, TransformerLayer, AutogradLayer, Head"
        );
        let refused = of("(a").unwrap_err();
        assert!(refused.ends_with("is no regular expression: unclosed group"), "{refused}");
        assert!(matches_of_types("head", &layers, None, None).is_err());
    }

    #[test]
    fn an_explicit_list_may_leave_stages_without_layers() {
        assert_eq!(counts(PartitionMethod::Explicit(vec![0, 3, 1]), &[1; 4], 0, 0, 3), [0, 3, 1]);
    }

    #[test]
    fn lists_that_do_not_fit_are_refused_with_the_numbers() {
        let text = refused(PartitionMethod::Explicit(vec![2, 2]), 4, 3);
        assert!(text.contains("2 entries") && text.contains("= 3 virtual"), "{text}");
        let text = refused(PartitionMethod::Explicit(vec![2, 3]), 4, 2);
        assert!(text.contains("2 + 3 = 5") && text.contains("num-layers = 4"), "{text}");
    }

    #[test]
    fn fewer_layers_than_stages_are_refused() {
        assert!(refused(PartitionMethod::Uniform, 3, 4).contains("3 layers are fewer than the 4"));
        assert!(
            refused(PartitionMethod::Parameters, 3, 4).contains("3 layers are fewer than the 4")
        );
        let types = PartitionMethod::Type("x".into());
        assert!(refused(types, 3, 4).contains("3 layers are fewer than the 4"));
        assert!(refused(PartitionMethod::Uniform, 3, 0).contains("0 virtual stages"));
    }
}
