//! Names of group formats, as logs, plans and records show them: `int4 g128 f16 zero`, `q4_k`, `nvfp4`.

use super::format::{GroupFormat, GroupScales, Offset, ScaleDType, Values};
use std::fmt;
use std::str::FromStr;

impl fmt::Display for ScaleDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        })
    }
}

impl fmt::Display for GroupFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.values {
            Values::Int { bits } => format!("int{bits}"),
            Values::Iq4 => "iq4".to_owned(),
            Values::E2m1 => "fp4".to_owned(),
            Values::E4m3 => "fp8".to_owned(),
        };
        match self.scales {
            GroupScales::Plain { group, dtype, offset } => {
                let offset = match offset {
                    Offset::None => "",
                    Offset::Zero => " zero",
                    Offset::Min => " min",
                };
                write!(f, "{name} g{group} {dtype}{offset}")
            }
            GroupScales::K4 => write!(f, "q{}_k", self.bits()),
            GroupScales::K6 => f.write_str("q6_k"),
            GroupScales::Xs => f.write_str("iq4_xs"),
            GroupScales::E4m3 => f.write_str("nvfp4"),
            GroupScales::E8m0 => f.write_str("mxfp4"),
        }
    }
}

/// A text that names no format.
#[derive(Debug, PartialEq, Eq)]
pub struct UnknownFormat;

impl FromStr for GroupFormat {
    type Err = UnknownFormat;

    fn from_str(text: &str) -> Result<Self, UnknownFormat> {
        let int = |bits, scales| Self { values: Values::Int { bits }, scales };
        match text {
            "q4_k" => return Ok(int(4, GroupScales::K4)),
            "q5_k" => return Ok(int(5, GroupScales::K4)),
            "q6_k" => return Ok(int(6, GroupScales::K6)),
            "iq4_xs" => return Ok(Self { values: Values::Iq4, scales: GroupScales::Xs }),
            "nvfp4" => return Ok(Self::NVFP4),
            "mxfp4" => return Ok(Self::MXFP4),
            _ => {}
        }
        let mut words = text.split(' ');
        let values = match words.next() {
            Some("int4") => Values::Int { bits: 4 },
            Some("int5") => Values::Int { bits: 5 },
            Some("int6") => Values::Int { bits: 6 },
            Some("int8") => Values::Int { bits: 8 },
            Some("iq4") => Values::Iq4,
            Some("fp4") => Values::E2m1,
            Some("fp8") => Values::E4m3,
            _ => return Err(UnknownFormat),
        };
        let group = words.next().and_then(|word| word.strip_prefix('g')?.parse().ok()).ok_or(UnknownFormat)?;
        let dtype = match words.next() {
            Some("f16") => ScaleDType::F16,
            Some("bf16") => ScaleDType::Bf16,
            Some("f32") => ScaleDType::F32,
            _ => return Err(UnknownFormat),
        };
        let offset = match words.next() {
            None => Offset::None,
            Some("zero") => Offset::Zero,
            Some("min") => Offset::Min,
            Some(_) => return Err(UnknownFormat),
        };
        Ok(Self { values, scales: GroupScales::Plain { group, dtype, offset } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_a_name_of_its_own() {
        let values = [4, 5, 6, 8].map(|bits| Values::Int { bits });
        let plain = values.into_iter().chain([Values::Iq4, Values::E2m1, Values::E4m3]).flat_map(|values| {
            [ScaleDType::F16, ScaleDType::Bf16, ScaleDType::F32].into_iter().flat_map(move |dtype| {
                [Offset::None, Offset::Zero, Offset::Min]
                    .map(|offset| GroupFormat { values, scales: GroupScales::Plain { group: 128, dtype, offset } })
            })
        });
        let named = ["q4_k", "q5_k", "q6_k", "iq4_xs", "nvfp4", "mxfp4"].map(|name| name.parse().unwrap());
        for format in plain.chain(named) {
            assert_eq!(format.to_string().parse(), Ok(format), "{format}");
        }
        for text in ["", "int4", "int4 g128", "int4 g128 f64", "int3 g128 f16", "int4 g128 f16 other", "q7_k"] {
            assert_eq!(text.parse::<GroupFormat>(), Err(UnknownFormat), "{text}");
        }
    }
}
