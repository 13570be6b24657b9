//! Entry points for fuzzing the parsers of input files (`tests/fuzz`).

use std::path::Path;

use megatron::data::SplitPoints;

use crate::cli::run_file;
use crate::commands::preprocess::documents::Pieces;
use crate::commands::preprocess::input::Input;

/// Most documents to read from one input: a few bytes can encode any number of empty documents.
const MOST: usize = 2000;

/// Reads a run file.
pub fn run_file(path: &Path) {
    let _ = run_file::read(path);
}

/// Reads the documents of an input of `preprocess`.
pub fn documents(path: &Path) {
    let keys = ["text".to_string()];
    let Ok(input) = Input::new(path) else { return };
    for piece in Pieces::new([input], &keys, SplitPoints::anywhere()).take(MOST) {
        let Ok(piece) = piece else { return };
        let _ = piece.texts(&keys);
    }
}
