//! Axes of a plot: linear, logarithmic or of names.

use anyhow::Result;
use plotters::coord::Shift;
use plotters::coord::combinators::LogCoord;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use std::ops::Range;

/// A part of a plot.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// A plot area with its axes.
pub type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Axis, Axis>>;

/// Left margin of a plot area in pixels, for labels.
pub const MARGIN: i32 = 64;

/// One axis of a plot.
pub enum Axis {
    /// Linear.
    Linear(RangedCoordf64),
    /// Logarithmic.
    Logarithmic(LogCoord<f64>),
    /// Names at 0, 1, 2 and so on.
    Names(Vec<String>),
}

impl Axis {
    /// A linear axis from 0 to above `most`.
    pub fn from_zero(most: f64) -> Self {
        Self::Linear((0.0..if most > 0.0 { 1.05 * most } else { 1.0 }).into())
    }

    /// A logarithmic axis with ticks at powers of `base`.
    pub fn logarithmic(range: Range<f64>, base: f64) -> Self {
        Self::Logarithmic(range.log_scale().base(base).into())
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        match self {
            Self::Linear(axis) => axis.map(value, limit),
            Self::Logarithmic(axis) => axis.map(value, limit),
            Self::Names(_) => RangedCoordf64::from(self.range()).map(value, limit),
        }
    }

    fn key_points<H: KeyPointHint>(&self, hint: H) -> Vec<f64> {
        match self {
            Self::Linear(axis) => axis.key_points(hint),
            Self::Logarithmic(axis) => axis.key_points(hint),
            Self::Names(names) => (0..names.len()).map(|i| i as f64).collect(),
        }
    }

    fn range(&self) -> Range<f64> {
        match self {
            Self::Linear(axis) => axis.range(),
            Self::Logarithmic(axis) => axis.range(),
            Self::Names(names) => -0.5..names.len() as f64 - 0.5,
        }
    }
}

impl ValueFormatter<f64> for Axis {
    fn format_ext(&self, value: &f64) -> String {
        match self {
            Self::Names(names) => names[*value as usize].clone(),
            _ => short(*value),
        }
    }
}

/// Style of text in this colour.
pub fn text(colour: RGBColor) -> TextStyle<'static> {
    ("system-ui, sans-serif", 15).into_font().color(&colour)
}

/// A plot area with its axes, which are drawn.
pub fn chart<'a, 'b>(
    area: &'a Area<'b>,
    (title, x_label): (&str, &str),
    (x, y): (Axis, Axis),
    ink: RGBColor,
) -> Result<Chart<'a, 'b>> {
    let mut chart = ChartBuilder::on(area)
        .caption(title, text(ink))
        .margin_right(20)
        .x_label_area_size(48)
        .y_label_area_size(MARGIN)
        .build_cartesian_2d(x, y)?;
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh().max_light_lines(0).axis_style(ink).bold_line_style(ink.mix(0.3));
    mesh.label_style(text(ink)).x_desc(x_label).x_labels(10).y_labels(8).draw()?;
    Ok(chart)
}

/// A number with few digits, and a suffix k or M.
fn short(value: f64) -> String {
    let (value, unit) = match value.abs() {
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    // Display writes no zeros at the end.
    format!("{}{unit}", (value * 1e6).round() / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([0.5, 20.0, 5000.0, 15000.0, 0.125, 3e6].map(short), ["0.5", "20", "5000", "15k", "0.125", "3M"]);
    }
}
