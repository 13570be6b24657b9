//! Pictures as SVG: of a schedule for `megatron timeline`, and those of the book.

pub mod svg;
pub mod timeline;
