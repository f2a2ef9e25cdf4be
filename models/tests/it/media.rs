//! Pictures: resampled as Pillow does it, and files that are none refused before anything is allocated for them.

use std::fmt::Write as _;
use std::io::Cursor;

use crate::counting_allocator::peak_during;
use crate::golden;
use gemma4c_models::media::{Cut, Pixels, Rgb, decode};
use image::{DynamicImage, ImageFormat, RgbImage};

/// Pictures of the reference data, the sizes that a budget of 70 gives them, and zlib's CRC of what Pillow 13 makes of
/// them.
const PILLOW: [(&str, (u32, u32), u32); 4] = [
    ("v_tiny_e.png", (480, 288), 0xcffb_119a),
    ("v_tiny_d.0.png", (192, 672), 0x585f_33cb),
    ("v_tiny_d.1.png", (480, 288), 0x1c3c_e7ef),
    ("v_tiny_u.png", (432, 336), 0x796b_a212),
];

#[test]
fn pictures_are_resampled_as_pillow_does_it() {
    for (name, (width, height), expected) in PILLOW {
        let model = name.split_once('.').expect("an ending").0;
        if !golden::has(&format!("vision/{model}")) {
            continue;
        }
        let picture = decode(&std::fs::read(golden::some().join("vision").join(name)).unwrap()).unwrap();
        let resized = Cut { patch: 16, pool: 3, budget: 70 }.resized(&picture).unwrap();
        assert_eq!(resized.size, Pixels { width, height }, "{name}");
        assert_eq!(crc32(&resized.bytes), expected, "{name}");
    }
}

fn crc32(bytes: &[u8]) -> u32 {
    let byte =
        |crc: u32, byte: &u8| (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 * (crc & 1)));
    !bytes.iter().fold(u32::MAX, byte)
}

/// A picture of one colour, which every format keeps.
fn picture(width: u32, height: u32) -> RgbImage {
    RgbImage::from_pixel(width, height, image::Rgb([200, 100, 50]))
}

fn encoded(picture: impl Into<DynamicImage>, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    picture.into().write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

#[test]
fn every_format_is_read() {
    for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Gif] {
        let Rgb { size, bytes } = decode(&encoded(picture(20, 10), format)).unwrap();
        assert_eq!(size, Pixels { width: 20, height: 10 }, "{format:?}");
        let near = |pixel: &[u8]| pixel.iter().zip([200, 100, 50]).all(|(a, b)| a.abs_diff(b) <= 4);
        assert!(bytes.len() == 600 && bytes.chunks(3).all(near), "{format:?}: {:?}", &bytes[..3]);
    }
    // Grey is all three colours.
    let grey = image::GrayImage::from_pixel(3, 2, image::Luma([77]));
    assert_eq!(decode(&encoded(grey, ImageFormat::Png)).unwrap().bytes, [77; 18]);
}

/// A PNG of one row with these bytes, and with these chunks before them.
fn png_row(width: u32, depth: u8, kind: u8, chunks: &[(&[u8; 4], &[u8])], row: &[u8]) -> Vec<u8> {
    let header = [&width.to_be_bytes()[..], &1u32.to_be_bytes(), &[depth, kind, 0, 0, 0]].concat();
    // One stored block of deflate: how the row is filtered (not at all), then the row.
    let length = row.len() as u16 + 1;
    let (mut low, mut high) = (1u32, 1u32);
    for byte in row {
        low = (low + u32::from(*byte)) % 65_521;
        high = (high + low) % 65_521;
    }
    let sum = high << 16 | low;
    let data = [&[0x78, 0x01, 1][..], &length.to_le_bytes(), &(!length).to_le_bytes(), &[0], row, &sum.to_be_bytes()];
    let data = data.concat();
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    for (name, body) in [(b"IHDR", &header[..])].iter().chain(chunks).chain(&[(b"IDAT", &data[..]), (b"IEND", &[])]) {
        let named = [&name[..], body].concat();
        file.extend([&(body.len() as u32).to_be_bytes()[..], &named, &crc32(&named).to_be_bytes()].concat());
    }
    file
}

/// Values are what Pillow 13 gives where transformers converts a picture to RGB: composited on white, 16 bits cut to 8.
#[test]
fn transparent_pictures_lie_on_white_as_in_transformers() {
    let palette: (&[u8; 4], &[u8]) = (b"PLTE", &[10, 20, 30, 200, 100, 50, 0, 0, 0]);
    let shorts = |values: &[u16]| values.iter().flat_map(|value| value.to_be_bytes()).collect::<Vec<u8>>();
    let colours = [0x1234, 0x80ff, 0xff7f, 0xffff, 0x1280, 0x00ff, 0xfe80, 0x8080, 500, 60_000, 1, 0];
    let gif = b"GIF89a\x03\0\x01\0\x81\0\0\x0a\x14\x1e\xc8\x64\x32\0\0\0\0\0\0\x21\xf9\x04\x01\0\0\x01\0\x2c\0\0\0\0\x03\0\x01\0\0\x08\x06\0\x01\x04\x10\x10\x10\0\x3b";
    let webp = [
        &b"RIFF\x38\0\0\0WEBPVP8L\x2b\0\0\0\x2f\x02\0\0\x10\x17\x40\x26\x60\x19\x7b\x37\x84\x23\x26\x4d\xd8\x69\xff\x3e\x66\x23\x93\xb6"[..],
        b"\x4d\x9d\x35\xd0\x6e\x02\x82\xa2\xeb\x96\x0b\xc2\xfc\x6f\x68\x42\x44\xff\x03\0",
    ];
    let white = [255u8; 3];
    for (name, file, expected) in [
        ("RGBA of 16 bits", png_row(3, 16, 6, &[], &shorts(&colours)), [[18, 128, 255], [136, 127, 254], white]),
        (
            "grey and alpha of 16 bits",
            png_row(3, 16, 4, &[], &shorts(&[0x12ff, 0xffff, 0x4080, 0x7fff, 9, 0])),
            [[18; 3], [160; 3], white],
        ),
        (
            "RGB of 16 bits",
            png_row(3, 16, 2, &[], &shorts(&[0x12ff, 0x1280, 0x127f, 0x00ff, 0xff00, 0xfeff, 0, 0, 0])),
            [[18; 3], [0, 255, 254], [0; 3]],
        ),
        ("grey and alpha", png_row(3, 8, 4, &[], &[100, 255, 100, 128, 9, 0]), [[100; 3], [177; 3], white]),
        ("a palette", png_row(3, 8, 3, &[palette, (b"tRNS", &[128, 0])], &[0, 1, 2]), [[132, 137, 142], white, [0; 3]]),
        (
            "one colour of RGB",
            png_row(3, 8, 2, &[(b"tRNS", &[0, 1, 0, 2, 0, 3])], &[1, 2, 3, 4, 5, 6, 1, 2, 4]),
            [white, [4, 5, 6], [1, 2, 4]],
        ),
        ("one grey", png_row(3, 8, 0, &[(b"tRNS", &[0, 7])], &[7, 8, 9]), [white, [8; 3], [9; 3]]),
        ("GIF", gif.to_vec(), [[10, 20, 30], white, [0; 3]]),
        ("WebP", webp.concat(), [[10, 20, 30], [227, 177, 152], white]),
    ] {
        assert_eq!(decode(&file).unwrap().bytes, expected.concat(), "{name}");
    }
    // Every value with every alpha: zlib's CRC of what Pillow gives.
    let all = image::RgbaImage::from_fn(256, 256, |x, y| image::Rgba([x as u8, 255 - x as u8, 7, y as u8]));
    assert_eq!(crc32(&decode(&encoded(all, ImageFormat::Png)).unwrap().bytes), 0xe25d_11f3);
}

/// A photograph that was taken with the camera upright is turned.
#[test]
fn a_photograph_stands_as_its_camera_says() {
    let mut wide = picture(20, 10);
    wide.put_pixel(0, 9, image::Rgb([0, 0, 0]));
    let jpeg = encoded(wide, ImageFormat::Jpeg);
    // Little-endian, one entry: orientation (0x112) is a short, 6: the left column is the top row.
    let exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0";
    let length = (exif.len() as u16 + 2).to_be_bytes();
    let turned = [&jpeg[..2], &[0xff, 0xe1], &length, exif, &jpeg[2..]].concat();
    assert_eq!(decode(&jpeg).unwrap().size, Pixels { width: 20, height: 10 });
    let Rgb { size, bytes } = decode(&turned).unwrap();
    assert_eq!(size, Pixels { width: 10, height: 20 });
    assert!(bytes[0] < 150 && bytes[27] > 150, "the corner below left is above left: {:?}", &bytes[..30]);
}

/// A PNG that says it has so many pixels and has few bytes of them.
fn claiming(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = encoded(picture(1, 1), ImageFormat::Png);
    bytes[16..20].copy_from_slice(&width.to_be_bytes());
    bytes[20..24].copy_from_slice(&height.to_be_bytes());
    let crc = crc32(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&crc.to_be_bytes());
    bytes
}

#[test]
fn what_is_no_picture_is_refused_and_takes_no_memory() {
    let jpeg = encoded(picture(200, 100), ImageFormat::Jpeg);
    let png = encoded(picture(200, 100), ImageFormat::Png);
    let webp = encoded(picture(200, 100), ImageFormat::WebP);
    let files: [(&str, Vec<u8>); 14] = [
        ("an empty file", vec![]),
        ("a text", b"hello".to_vec()),
        ("SVG", br#"<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"></svg>"#.to_vec()),
        ("a format that is not read", b"BM\0\0\0\0\0\0\0\0\0\0\0\0\0\0".to_vec()),
        ("a PNG of 100,000 x 100,000", claiming(100_000, 100_000)),
        ("a PNG of 2^31 x 2^31", claiming(1 << 31, 1 << 31)),
        ("a PNG of 30,000 x 3,000 that has no pixels", claiming(30_000, 3_000)),
        ("a PNG without width", claiming(0, 10)),
        ("a cut PNG", png[..png.len() - 30].to_vec()),
        ("a PNG cut in its header", png[..20].to_vec()),
        ("a JPEG without its end", jpeg[..jpeg.len() - 2].to_vec()),
        ("a JPEG cut half way", jpeg[..jpeg.len() / 2].to_vec()),
        ("a JPEG cut in its header", jpeg[..30].to_vec()),
        ("a cut WebP", webp[..webp.len() / 2].to_vec()),
    ];
    let mut texts = String::new();
    for (name, file) in files {
        let (error, peak) = peak_during(|| decode(&file).expect_err(name));
        assert!(peak < 4 << 20, "{name}: {peak} bytes");
        writeln!(texts, "{name}\n    {error}").unwrap();
    }
    insta::with_settings!({
        snapshot_path => "../../../snapshots/errors",
        prepend_module_to_snapshot => false,
        omit_expression => true,
    }, { insta::assert_snapshot!("pictures", texts) });
}

/// Deflated zeros, as many as make a small file large: after one zero, each 13 bits repeat it 258 times.
fn bomb(megabytes: usize) -> Vec<u8> {
    // The last block, with fixed codes; a literal 0.
    let mut bits = vec![1u8, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0];
    for _ in 0..megabytes * (1 << 20) / 258 {
        bits.extend([1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0]);
    }
    bits.extend([0; 7]);
    let byte = |bits: &[u8]| bits.iter().rev().fold(0, |byte, bit| byte << 1 | bit);
    [&[0x78, 0x01][..], &bits.chunks(8).map(byte).collect::<Vec<_>>(), &[0; 4]].concat()
}

/// A colour profile that is no picture's: the picture is read or refused, and takes little memory either way.
#[test]
fn what_is_compressed_beside_a_picture_is_bounded() {
    let png = encoded(picture(8, 8), ImageFormat::Png);
    let body = [&b"iCCPprofile\0\0"[..], &bomb(400)].concat();
    let chunk = [&(body.len() as u32 - 4).to_be_bytes()[..], &body, &crc32(&body).to_be_bytes()].concat();
    let file = [&png[..33], &chunk, &png[33..]].concat();
    assert!(file.len() < 4 << 20);
    let (_, peak) = peak_during(|| decode(&file));
    assert!(peak < 100 << 20, "{peak} bytes");
}
