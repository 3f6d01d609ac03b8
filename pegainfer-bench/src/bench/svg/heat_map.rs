//! A table with cells coloured by value.

use super::axes::{Area, Axis, MARGIN, chart, text};
use super::{Draw, PANEL};
use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Width of a cell in pixels.
const CELL: u32 = 30;

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

impl Draw for HeatMap {
    fn legend(&self) -> Vec<(&str, bool)> {
        Vec::new()
    }

    fn width(&self) -> u32 {
        (MARGIN as u32 + 20 + CELL * self.columns.len() as u32).max(PANEL.0)
    }

    fn draw(&self, area: &Area<'_>, ink: RGBColor) -> Result<()> {
        let rows = self.rows.iter().map(|(label, _)| label.clone()).collect();
        let axes = (Axis::Names(self.columns.clone()), Axis::Names(rows));
        let mut chart = chart(area, (&self.title, &self.x_label), axes, ink)?;
        for (y, (_, cells)) in self.rows.iter().enumerate() {
            for (x, value) in cells.iter().enumerate().filter_map(|(x, cell)| Some((x as f64, (*cell)?))) {
                let (y, colour) = (y as f64, ViridisRGB.get_color(value));
                let ink = if value > 0.4 { BLACK } else { WHITE };
                chart.draw_series([Rectangle::new([(x - 0.5, y - 0.5), (x + 0.5, y + 0.5)], colour.filled())])?;
                let style = text(ink).pos(Pos::new(HPos::Center, VPos::Center));
                chart.draw_series([Text::new(format!("{:.0}", 100.0 * value), (x, y), style)])?;
            }
        }
        Ok(())
    }
}
