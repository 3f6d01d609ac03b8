//! Stacked bars.

use super::axes::{Area, Axis, chart};
use super::{COLOURS, Draw};
use anyhow::Result;
use plotters::prelude::*;

/// Bars of the same parts, stacked in order from the axis up.
#[derive(Debug, Clone)]
pub struct Bars {
    /// Name and unit of the y axis.
    pub title: String,
    /// Name of the x axis.
    pub x_label: String,
    /// Names of the parts in the legend.
    pub parts: Vec<String>,
    /// The label of each bar, and its parts in the order of their names.
    pub bars: Vec<(String, Vec<f64>)>,
}

impl Draw for Bars {
    fn legend(&self) -> Vec<(&str, bool)> {
        self.parts.iter().map(|part| (part.as_str(), false)).collect()
    }

    fn draw(&self, area: &Area<'_>, ink: RGBColor) -> Result<()> {
        let highest = self.bars.iter().map(|(_, parts)| parts.iter().sum()).fold(0.0, f64::max);
        let names = Axis::Names(self.bars.iter().map(|(label, _)| label.clone()).collect());
        let axes = (names, Axis::from_zero(highest));
        let mut chart = chart(area, (&self.title, &self.x_label), axes, ink)?;
        for (i, (_, parts)) in self.bars.iter().enumerate() {
            let (x, mut sum) = (i as f64, 0.0);
            for (part, colour) in parts.iter().zip(COLOURS.iter().cycle()) {
                let corners = [(x - 0.3, sum), (x + 0.3, sum + part)];
                chart.draw_series([Rectangle::new(corners, colour.filled())])?;
                sum += part;
            }
        }
        Ok(())
    }
}
