//! Plots as SVG: panels of lines, [`bars`](bars::Bars) or a [`heat map`](heat_map::HeatMap), drawn by plotters.

pub mod axes;
pub mod bars;
pub mod heat_map;

use anyhow::Result;
use axes::{Area, Axis, Chart, MARGIN, chart, text};
use plotters::prelude::*;

/// Width and height of a panel in pixels, without its legend.
const PANEL: (u32, u32) = (490, 340);
/// Height of the plot's title, of its note and of a line of the legend.
const LINE: i32 = 20;
const COLOURS: [RGBColor; 8] = [
    RGBColor(0x2f, 0x81, 0xf7),
    RGBColor(0xe0, 0x7b, 0x20),
    RGBColor(0x2d, 0xa4, 0x4e),
    RGBColor(0xb0, 0x63, 0xd9),
    RGBColor(0xd6, 0x45, 0x50),
    RGBColor(0x1a, 0x9b, 0xa1),
    RGBColor(0xc9, 0xa2, 0x27),
    RGBColor(0x8c, 0x8c, 0x8c),
];
/// Ratio of the ends of an x axis above which it is logarithmic.
const LOGARITHMIC: f64 = 9.0;
/// Factor between the ends of an axis with decades and the values.
const DECADE_MARGIN: f64 = 1.6;
/// Radius in pixels of a dot with a share of 1, and the least radius.
const RADIUS: (f64, f64) = (15.0, 2.5);

/// Colour of text, axes and grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ink {
    /// Readable on white and on black.
    Grey,
    /// For a white background.
    Dark,
    /// For a black background.
    Light,
}

impl Ink {
    fn colour(self) -> RGBColor {
        match self {
            Self::Grey => RGBColor(0x80, 0x88, 0x90),
            Self::Dark => RGBColor(0x1f, 0x23, 0x28),
            Self::Light => RGBColor(0xf0, 0xf6, 0xfc),
        }
    }
}

/// How the points of a series are drawn.
#[derive(Debug, Clone, PartialEq)]
pub enum Mark {
    /// Joined by a line.
    Line,
    /// Joined by a dashed line, which marks a limit.
    Dashed,
    /// Not joined.
    Points,
    /// Joined by a thin line, with a label and an area from 0 to 1 for each point.
    Dots(Vec<(String, f64)>),
}

/// One line of a plot.
#[derive(Debug, Clone)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// How its points are drawn.
    pub mark: Mark,
    /// Points (x, y); those that are not finite are left out.
    pub points: Vec<(f64, f64)>,
}

/// One plot of lines or points. Its y axis begins at 0; with dots, both axes are logarithmic.
#[derive(Debug, Clone)]
pub struct Panel {
    /// Name and unit of the y axis.
    pub title: String,
    /// Name of the x axis.
    pub x_label: String,
    /// Lines, drawn in order.
    pub series: Vec<Series>,
}

/// A panel's content.
pub trait Draw {
    /// Names of its colours, each with true for a dashed line.
    fn legend(&self) -> Vec<(&str, bool)>;

    /// Width of the panel in pixels.
    fn width(&self) -> u32 {
        PANEL.0
    }

    /// Draws plot area and axes.
    fn draw(&self, area: &Area<'_>, ink: RGBColor) -> Result<()>;
}

/// Renders the plots side by side, with `title` above and `note` below.
pub fn render(title: &str, note: &str, panels: &[impl Draw], ink: Ink) -> Result<String> {
    let lines = panels.iter().map(|panel| panel.legend().len()).max().unwrap_or(0) as i32;
    let width = panels.iter().map(Draw::width).sum();
    let body = LINE + PANEL.1 as i32 + LINE / 2;
    let height = body + LINE * (lines + 1);
    let (ink, mut out) = (ink.colour(), String::new());
    {
        let root = SVGBackend::with_string(&mut out, (width, height as u32)).into_drawing_area();
        root.draw_text(title, &text(ink), (MARGIN, 4))?;
        root.draw_text(note, &text(ink), (MARGIN, height - LINE))?;
        let (_, mut rest) = root.split_vertically(LINE);
        for panel in panels {
            let (area, right) = rest.split_horizontally(panel.width());
            let (plot, legend) = area.split_vertically(PANEL.1);
            panel.draw(&plot, ink)?;
            for (i, (name, dashed)) in panel.legend().into_iter().enumerate() {
                let (y, colour) = (LINE / 2 + LINE * i as i32, COLOURS[i % COLOURS.len()]);
                let (step, length) = if dashed { (9, 6) } else { (24, 24) };
                for x in (MARGIN..MARGIN + 24).step_by(step) {
                    legend.draw(&Rectangle::new([(x, y + 5), (x + length, y + 9)], colour.filled()))?;
                }
                legend.draw_text(name, &text(ink), (MARGIN + 32, y))?;
            }
            rest = right;
        }
        root.present()?;
    }
    Ok(out)
}

impl Draw for Panel {
    fn legend(&self) -> Vec<(&str, bool)> {
        self.series.iter().map(|series| (series.name.as_str(), series.mark == Mark::Dashed)).collect()
    }

    fn draw(&self, area: &Area<'_>, ink: RGBColor) -> Result<()> {
        let points = || self.series.iter().flat_map(|series| &series.points).filter(|point| self.shown(point));
        let (x0, x1) = ends(points().map(|point| point.0));
        let (y0, y1) = ends(points().map(|point| point.1));
        let axes = if self.decades() {
            let axis = |least: f64, most: f64| {
                let base = if most / least > 50.0 { 10.0 } else { 2.0 };
                Axis::logarithmic(least / DECADE_MARGIN..most * DECADE_MARGIN, base)
            };
            (axis(x0, x1), axis(y0, y1))
        } else if x0 > 0.0 && x1 / x0 > LOGARITHMIC {
            (Axis::logarithmic(x0..x1, 2.0), Axis::from_zero(y1))
        } else {
            (Axis::Linear((x0..x1).into()), Axis::from_zero(y1))
        };
        self.fill(chart(area, (&self.title, &self.x_label), axes, ink)?)
    }
}

impl Panel {
    fn decades(&self) -> bool {
        self.series.iter().any(|series| matches!(series.mark, Mark::Dots(_)))
    }

    fn shown(&self, (x, y): &(f64, f64)) -> bool {
        x.is_finite() && y.is_finite() && (!self.decades() || x.min(*y) > 0.0)
    }

    /// Draws the series.
    fn fill(&self, mut chart: Chart<'_, '_>) -> Result<()> {
        // Pixels of labels, which the next ones avoid.
        let mut taken: Vec<(i32, i32)> = Vec::new();
        for (series, colour) in self.series.iter().zip(COLOURS.iter().cycle()) {
            let points: Vec<(f64, f64)> = series.points.iter().copied().filter(|point| self.shown(point)).collect();
            let stroke = colour.stroke_width(2);
            match &series.mark {
                Mark::Line => _ = chart.draw_series(LineSeries::new(points.clone(), stroke))?,
                Mark::Dashed => _ = chart.draw_series(DashedLineSeries::new(points.clone(), 5, 4, stroke))?,
                Mark::Points => {}
                Mark::Dots(dots) => {
                    chart.draw_series(LineSeries::new(points, colour.mix(0.5)))?;
                    for (point, (label, area)) in series.points.iter().zip(dots).filter(|(point, _)| self.shown(point))
                    {
                        let radius = (RADIUS.0 * area.clamp(0.0, 1.0).sqrt()).max(RADIUS.1) as i32;
                        let circle = Circle::new(*point, radius, colour.mix(0.6).filled());
                        chart.draw_series([circle])?;
                        let (x, y) = chart.backend_coord(point);
                        if taken.iter().all(|(other_x, other_y)| (x - other_x).abs() > 40 || (y - other_y).abs() > 10) {
                            taken.push((x, y));
                            let label = Text::new(label.clone(), (radius + 2, -5), text(*colour));
                            chart.draw_series([EmptyElement::at(*point) + label])?;
                        }
                    }
                    continue;
                }
            }
            chart.draw_series(points.into_iter().map(|point| Circle::new(point, 3, colour.filled())))?;
        }
        Ok(())
    }
}

/// The least and the largest value, or 1 without values.
fn ends(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.map(|value| (value, value)).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or((1.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(points: &[(f64, f64)]) -> Panel {
        let series = |name: &str, mark| Series { name: name.into(), mark, points: points.to_vec() };
        let series = vec![series("p50 & <p99>", Mark::Line), series("floor", Mark::Dashed)];
        Panel { title: "TPOT, ms".into(), x_label: "requests".into(), series }
    }

    #[test]
    fn a_plot_holds_every_finite_point_once() {
        for points in [
            &[(1.0, 3.6), (8.0, 3.9), (32.0, 6.2), (128.0, 19.3)][..],
            &[(4.0, 0.02), (5.0, 0.07), (6.0, 0.1), (7.0, f64::NAN)],
            &[(1.0, 123_456.0)],
            &[(0.0, 0.0), (2.0, 0.0)],
            &[],
        ] {
            let svg = render("title", "note", &[panel(points), panel(points)], Ink::Grey).unwrap();
            let finite = points.iter().filter(|point| point.1.is_finite()).count();
            assert_eq!(svg.matches("<circle").count(), 4 * finite, "{svg}");
            assert!(svg.contains("p50 &amp; &lt;p99&gt;") && svg.ends_with("</svg>\n"), "{svg}");
        }
    }

    #[test]
    fn dots_at_the_same_place_have_one_label() {
        let dots = Mark::Dots(vec![("label".into(), 0.1); 40]);
        let series = vec![Series { name: "linear".into(), mark: dots, points: vec![(5.0, 5.0); 40] }];
        let svg = render("", "", &[Panel { series, ..panel(&[]) }], Ink::Grey).unwrap();
        assert_eq!((svg.matches("<circle").count(), svg.matches("\nlabel\n").count()), (40, 1), "{svg}");
    }
}
