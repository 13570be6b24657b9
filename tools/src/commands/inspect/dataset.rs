//! What an indexed dataset holds.

use std::path::Path;

use indicatif::{DecimalBytes, HumanCount};
use megatron::data::IndexedDataset;

use super::{fact, short};
use crate::error::Result;
use crate::report::ByteBar;

/// Prints what `PREFIX.bin` and `PREFIX.idx` hold; with `verify`, reads all tokens.
pub fn inspect(prefix: &Path, verify: bool) -> Result<()> {
    let dataset = IndexedDataset::open(prefix)?;
    let size = dataset.token_type().size() as u64;
    let (sequences, tokens) = (dataset.num_sequences(), dataset.num_tokens());
    let (mut shortest, mut longest, mut empty) = (u64::MAX, 0, 0u64);
    dataset.for_each_length(0..sequences, |length| {
        (shortest, longest) = (shortest.min(length), longest.max(length));
        empty += u64::from(length == 0);
    })?;
    fact("dataset", dataset.path().with_extension("").display());
    fact("sequences", HumanCount(sequences));
    fact("documents", HumanCount(dataset.num_documents()));
    fact("tokens", format!("{} ({})", HumanCount(tokens), short(tokens)));
    let mean = tokens as f64 / sequences.max(1) as f64;
    fact(
        "lengths",
        format!("{shortest} to {longest} tokens per sequence, {mean:.1} on average, {empty} empty"),
    );
    let token_type = format!("{:?}", dataset.token_type()).to_lowercase();
    fact("stored as", format!("{token_type}, {}", DecimalBytes(tokens.saturating_mul(size))));
    let places = if dataset.is_contiguous() {
        "the index accounts for every byte"
    } else {
        fact("order", "sequences are not contiguous in the .bin file");
        "every sequence of the index is in the .bin file"
    };
    if verify {
        let bar = ByteBar::new("reading", tokens.saturating_mul(size));
        let largest = dataset.largest_token(&mut |count| bar.add(count * size))?;
        bar.finish();
        fact(
            "largest id",
            format!("{largest}: fits vocabularies of {} or more tokens", u64::from(largest) + 1),
        );
        fact("whole", format!("yes: {places}, and every token is an id"));
    } else {
        fact("whole", format!("{places}; tokens were not checked (--verify=false)"));
    }
    Ok(())
}
