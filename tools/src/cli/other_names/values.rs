//! Values that Megatron-LM supports and this program does not, for flags that both have.

/// A flag, values, and why they are refused.
const VALUES: [(&str, &str, &str); 5] = [
    (
        "optimizer",
        "muon dist_muon adaptive_muon lion soap shampoo",
        "only AdamW (adam) and SGD with momentum (sgd) are supported",
    ),
    (
        "position-embedding-type",
        "mrope relative yarn",
        "only learned_absolute, rope, alibi and none are supported",
    ),
    ("exp-avg-dtype", "fp16 fp8", "moments are kept in fp32 or bf16"),
    ("exp-avg-sq-dtype", "fp16 fp8", "moments are kept in fp32 or bf16"),
    ("dataloader-type", "external", "external data loaders are not supported"),
];

/// Why `value` of a flag of this program is refused, if it is a value of Megatron-LM; by the flag's
/// name with dashes.
pub fn refused_value(flag: &str, value: &str) -> Option<&'static str> {
    let known = VALUES
        .iter()
        .find(|(name, values, _)| *name == flag && values.split(' ').any(|known| known == value));
    known.map(|(_, _, because)| *because)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::flags::sections;

    #[test]
    fn no_value_of_ours_is_among_them() {
        let args: Vec<_> = sections().into_iter().flat_map(|(_, args)| args).collect();
        for (flag, values, _) in VALUES {
            let arg = args.iter().find(|arg| arg.get_long() == Some(flag)).unwrap();
            for value in values.split(' ') {
                assert!(
                    arg.get_possible_values().iter().all(|ours| !ours.matches(value, false)),
                    "{flag} {value}"
                );
            }
        }
    }
}
