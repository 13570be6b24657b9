//! Finds the known name that a user most likely meant.

/// The name in `known` nearest to `typed`, if it is near enough to suggest: one or two typing
/// errors away, not in the first letter. A more distant name means something else.
pub fn nearest<'a>(typed: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|name| (strsim::damerau_levenshtein(typed, name), name))
        .min()
        .filter(|(distance, name)| *distance <= (typed.len().max(name.len()) / 3).min(2))
        .filter(|(distance, name)| *distance == 1 || typed.chars().next() == name.chars().next())
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelling_finds_its_name() {
        assert_eq!(nearest("hiden_size", ["hidden_size", "num_layers"]), Some("hidden_size"));
    }

    #[test]
    fn something_else_finds_nothing() {
        let known = ["hidden_size", "num_layers", "vocab_size", "rotary_base", "exit_interval"];
        for typed in
            ["banana", "tp_size", "rotary_percent", "exit_signal_handler", "num_gpu_layers", ""]
        {
            assert_eq!(nearest(typed, known), None, "{typed}");
        }
    }
}
