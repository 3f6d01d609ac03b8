//! Decoded pixels against Pillow's.

use crate::counting::peak_bytes;
use crate::{expected, fixture, keys, names, pair, sha256};
use pegainfer_images::{Format, ImageLimits, Rgb8, decode, probe};
use png::{BitDepth, ColorType, Encoder};
use serde_json::Value;

/// Largest difference between decoders of lossy files, in levels.
const MAX_DIFFERENCE: u8 = 6;

#[test]
fn unusual_files_decode_as_in_pillow() {
    let expected = expected("decoded");
    assert_eq!(names("odd"), keys(&expected));
    for name in names("odd") {
        let (bytes, limits) = (fixture(&format!("odd/{name}")), ImageLimits::default());
        let (image, header) = (decode(&bytes, &limits).unwrap(), probe(&bytes, &limits).unwrap());
        let size = pair(&expected[&name]["size_wh"]);
        assert_eq!((image.width, image.height), size, "{name}");
        assert_eq!((header.width, header.height), size, "{name}");
        match expected[&name]["rgb_sha256"].as_str() {
            Some(hash) => assert_eq!(sha256(&image.pixels), hash, "{name}"),
            None => compare_lossy(&name, &image, &expected[&name]),
        }
    }
}

/// Compares the mean of each channel and some pixels.
fn compare_lossy(name: &str, image: &Rgb8, expected: &Value) {
    for channel in 0..3 {
        let sum: u64 = image.pixels.iter().skip(channel).step_by(3).map(|value| u64::from(*value)).sum();
        let mean = sum as f64 / f64::from(image.width * image.height);
        let difference = (mean - expected["mean"][channel].as_f64().unwrap()).abs();
        assert!(difference < 1.0, "{name}: mean {mean} of channel {channel}");
    }
    for pixel in expected["pixels"].as_array().unwrap() {
        let value = |i: usize| pixel[i].as_u64().unwrap() as usize;
        let at = 3 * (value(1) * image.width as usize + value(0));
        for (channel, found) in image.pixels[at..at + 3].iter().enumerate() {
            let difference = found.abs_diff(value(2 + channel) as u8);
            assert!(difference <= MAX_DIFFERENCE, "{name}: {found} for {pixel}, channel {channel}");
        }
    }
}

#[test]
fn the_format_is_that_of_the_content() {
    let format = |name: &str| probe(&fixture(name), &ImageLimits::default()).unwrap().format;
    assert_eq!(format("odd/jpeg_named.png"), Format::Jpeg);
    assert_eq!(format("odd/lossy.webp"), Format::WebP);
    assert_eq!(format("odd/still.gif"), Format::Gif);
    assert_eq!(format("odd/gray16.png"), Format::Png);
}

/// A PNG file of 3 x 1 pixels.
fn png(color: ColorType, depth: BitDepth, transparent: Option<&[u8]>, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, 3, 1);
    encoder.set_color(color);
    encoder.set_depth(depth);
    if let Some(color) = transparent {
        encoder.set_trns(color);
    }
    encoder.write_header().unwrap().write_image_data(data).unwrap();
    bytes
}

#[test]
fn alpha_is_blended_over_white() {
    use BitDepth::{Eight, Sixteen};
    let pixels = |bytes: Vec<u8>| decode(&bytes, &ImageLimits::default()).unwrap().pixels;
    let rgba = png(ColorType::Rgba, Eight, None, &[9, 8, 7, 255, 9, 8, 7, 0, 0, 100, 255, 128]);
    assert_eq!(pixels(rgba), [9, 8, 7, 255, 255, 255, 127, 177, 255]);
    let grey = png(ColorType::GrayscaleAlpha, Eight, None, &[9, 255, 9, 0, 0, 128]);
    assert_eq!(pixels(grey), [9, 9, 9, 255, 255, 255, 127, 127, 127]);
    let deep = png(ColorType::GrayscaleAlpha, Sixteen, None, &[9, 250, 255, 255, 9, 0, 0, 255, 0, 255, 128, 255]);
    assert_eq!(pixels(deep), [9, 9, 9, 255, 255, 255, 127, 127, 127]);
    // One transparent colour, of which all 16 bits have to match.
    let keyed = png(ColorType::Grayscale, Sixteen, Some(&[9, 1]), &[9, 1, 9, 2, 10, 1]);
    assert_eq!(pixels(keyed), [255, 255, 255, 9, 9, 9, 10, 10, 10]);
}

#[test]
fn png_takes_three_bytes_a_pixel() {
    let (width, height) = (2_000, 1_500);
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, width, height);
    encoder.set_color(ColorType::Rgba);
    encoder.set_depth(BitDepth::Sixteen);
    encoder.write_header().unwrap().write_image_data(&vec![200; (width * height * 8) as usize]).unwrap();
    let (image, peak) = peak_bytes(|| decode(&bytes, &ImageLimits::default()).unwrap());
    assert!(image.pixels.iter().all(|value| *value == 212), "{:?}", &image.pixels[..3]);
    assert!(peak < (width * height * 3) as usize + (1 << 20), "{peak} bytes");
}
