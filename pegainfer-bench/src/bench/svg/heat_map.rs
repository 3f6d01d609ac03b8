//! A table whose cells are coloured by their values.

use super::{BELOW, Draw, PLOT, text};
use std::fmt::Write;

/// Width of a cell in pixels.
const CELL: f64 = 30.0;
/// Colours of 0, 25, 50, 75 and 100 %, from dark to light (viridis by van der Walt and Smith): readable without seeing hues.
const SCALE: [(u8, u8, u8); 5] = [(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)];
/// Lightness of a colour from which on text in it is dark.
const LIGHT: f64 = 0.41;

/// Rows of cells with values from 0 to 1, which are written as percentages.
#[derive(Debug, Clone)]
pub struct HeatMap {
    /// Name of the rows.
    pub title: String,
    /// Name of the columns.
    pub x_label: String,
    /// Label of each column.
    pub columns: Vec<String>,
    /// Label of each row and its cells in the order of the columns, from the lowest row to the highest; `None` leaves a cell empty.
    pub rows: Vec<(String, Vec<Option<f64>>)>,
}

/// Colour of a value from 0 to 1, and that of text on it.
fn colours(value: f64) -> (String, &'static str) {
    let place = value.clamp(0.0, 1.0) * (SCALE.len() - 1) as f64;
    let below = (place as usize).min(SCALE.len() - 2);
    let part = place - below as f64;
    let mix = |a: u8, b: u8| f64::from(a) * (1.0 - part) + f64::from(b) * part;
    let ((r0, g0, b0), (r1, g1, b1)) = (SCALE[below], SCALE[below + 1]);
    let (r, g, b) = (mix(r0, r1), mix(g0, g1), mix(b0, b1));
    let lightness = (0.299 * r + 0.587 * g + 0.114 * b) / 255.0;
    (format!("#{:02x}{:02x}{:02x}", r as u8, g as u8, b as u8), if lightness > LIGHT { "#111111" } else { "#ffffff" })
}

impl Draw for HeatMap {
    fn legend_lines(&self) -> usize {
        1
    }

    fn width(&self) -> f64 {
        (CELL * self.columns.len() as f64).max(PLOT.0)
    }

    fn draw(&self, out: &mut String) {
        text(out, 0.0, -10.0, "start", &self.title);
        let mut numbers = String::new();
        let mut cell = |out: &mut String, (x, y): (f64, f64), height: f64, value: f64| {
            let (colour, ink) = colours(value);
            let _ = writeln!(
                out,
                "<rect x=\"{x:.0}\" y=\"{y:.1}\" width=\"{CELL}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
            );
            let (x, y) = (x + CELL / 2.0, y + height / 2.0 + 4.0);
            let _ = writeln!(numbers, "<text x=\"{x:.0}\" y=\"{y:.1}\" fill=\"{ink}\">{:.0}</text>", 100.0 * value);
        };
        let height = PLOT.1 / self.rows.len().max(1) as f64;
        for (i, (label, cells)) in self.rows.iter().enumerate() {
            let y = PLOT.1 - height * (i + 1) as f64;
            text(out, -8.0, y + height / 2.0 + 4.0, "end", label);
            for (j, value) in cells.iter().enumerate() {
                if let Some(value) = value.filter(|value| value.is_finite()) {
                    cell(out, (CELL * j as f64, y), height, value);
                }
            }
        }
        for (j, label) in self.columns.iter().enumerate() {
            text(out, CELL * (j as f64 + 0.5), PLOT.1 + 19.0, "middle", label);
        }
        text(out, self.width() / 2.0, PLOT.1 + 38.0, "middle", &self.x_label);
        for step in 0..=10 {
            cell(out, (CELL * f64::from(step), PLOT.1 + BELOW - 8.0), 16.0, f64::from(step) / 10.0);
        }
        text(out, CELL * 11.0 + 8.0, PLOT.1 + BELOW + 4.0, "start", "%");
        let _ = writeln!(out, "<g text-anchor=\"middle\" font-size=\"11\">\n{numbers}</g>");
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{values, well_formed};
    use super::super::{Ink, LEFT, RIGHT, render};
    use super::*;

    #[test]
    fn cells_are_in_their_row_and_column() {
        let columns: Vec<String> = (0..20).map(|i| i.to_string()).collect();
        let mut low = vec![Some(0.5); 20];
        low[1] = None;
        low[2] = Some(f64::NAN);
        let rows = vec![("16".into(), low), ("64".into(), vec![Some(0.25)])];
        let map = HeatMap { title: "tokens".into(), x_label: "a < b".into(), columns, rows };
        let svg = render("", "", &[map], Ink::Grey);
        well_formed(&svg);
        assert_eq!(values(&svg, "width")[0], LEFT + 20.0 * CELL + RIGHT);
        let cells: Vec<&str> = svg.lines().filter(|line| line.starts_with("<rect")).collect();
        // 18 and one, and eleven of the legend.
        assert_eq!(cells.len(), 30);
        let place = |line: &str| (values(line, "x")[0], values(line, "y")[0]);
        assert_eq!((place(cells[0]), place(cells[1])), ((0.0, PLOT.1 / 2.0), (3.0 * CELL, PLOT.1 / 2.0)));
        assert_eq!(place(cells[18]), (0.0, 0.0), "the second row is above the first");
        assert!(svg.contains(">50</text>") && svg.contains(">25</text>") && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn colours_get_lighter_and_text_is_readable_on_them() {
        let light = |text: &str| {
            let channel = |i: usize| f64::from(u8::from_str_radix(&text[i..i + 2], 16).unwrap()) / 255.0;
            // Relative luminance of WCAG 2.
            let linear = |v: f64| if v <= 0.04045 { v / 12.92 } else { ((v + 0.055) / 1.055).powf(2.4) };
            0.2126 * linear(channel(1)) + 0.7152 * linear(channel(3)) + 0.0722 * linear(channel(5))
        };
        let mut darker = -1.0;
        for percent in 0..=100 {
            let (colour, ink) = colours(f64::from(percent) / 100.0);
            let (colour, ink) = (light(&colour), light(ink));
            assert!(colour > darker, "{percent} %");
            darker = colour;
            let contrast = (colour.max(ink) + 0.05) / (colour.min(ink) + 0.05);
            assert!(contrast > 4.0, "{percent} %: contrast {contrast}");
        }
        assert_eq!((colours(-1.0), colours(7.0)), (colours(0.0), colours(1.0)));
    }
}
