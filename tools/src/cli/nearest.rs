//! The known name that a user most likely meant.

/// The name among `known` that is nearest to `typed`, if any is near enough to suggest.
pub fn nearest<'a>(typed: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|name| (strsim::damerau_levenshtein(typed, name), name))
        .min()
        .filter(|(distance, name)| *distance <= typed.len().max(name.len()) / 3)
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
        assert_eq!(nearest("banana", ["hidden_size", "num_layers"]), None);
    }
}
