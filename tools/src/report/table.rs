//! Tables in Markdown whose columns also line up on a terminal.

use std::fmt;

/// A table; the first column is text, the others are numbers.
#[derive(Clone, Debug)]
pub struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new<const N: usize>(header: [&str; N]) -> Self {
        Self { header: header.map(str::to_string).to_vec(), rows: Vec::new() }
    }

    /// Whether it has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Adds a row with a cell per column.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.header.len());
        self.rows.push(cells.to_vec());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| &row[column]).chain([&self.header[column]]);
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0).max(3)
        };
        let widths: Vec<usize> = (0..self.header.len()).map(width).collect();
        let line = |f: &mut fmt::Formatter<'_>, cells: &[String]| {
            for (column, (cell, width)) in cells.iter().zip(&widths).enumerate() {
                match column {
                    0 => write!(f, "| {cell:<width$} ")?,
                    _ => write!(f, "| {cell:>width$} ")?,
                }
            }
            writeln!(f, "|")
        };
        line(f, &self.header)?;
        let rule = |(column, width): (usize, &usize)| match column {
            0 => "-".repeat(*width),
            _ => format!("{}:", "-".repeat(width - 1)),
        };
        line(f, &widths.iter().enumerate().map(rule).collect::<Vec<_>>())?;
        self.rows.iter().try_for_each(|row| line(f, row))
    }
}

/// `value` with about three significant digits, however large it is.
pub fn significant(value: f64) -> String {
    let decimals = match value.abs() {
        a if a >= 100.0 => 0,
        a if a >= 10.0 => 1,
        a if a >= 1.0 => 2,
        a if a >= 0.1 => 3,
        _ => 4,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_numbers_are_on_the_right() {
        let mut table = Table::new(["kernel", "ms"]);
        table.row(["linear".to_string(), "12.5".to_string()]);
        table.row(["fill".to_string(), "3".to_string()]);
        assert_eq!(
            table.to_string(),
            "| kernel |   ms |\n| ------ | ---: |\n| linear | 12.5 |\n| fill   |    3 |\n"
        );
    }

    #[test]
    fn numbers_keep_about_three_digits() {
        assert_eq!(
            [1234.5, 12.345, 1.2345, 0.12345].map(significant),
            ["1234", "12.3", "1.23", "0.123"]
        );
    }
}
