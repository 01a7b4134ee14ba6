//! Today's date as templates ask for it, in UTC.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// The time of day, spelled as `format` says (C's `strftime`, its common directives).
pub(super) fn now_in_utc(format: &str) -> String {
    // A clock before 1970 is set wrong; its date does not matter.
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    spell(format, seconds)
}

fn spell(format: &str, unix_seconds: u64) -> String {
    let days = unix_seconds / 86_400;
    let in_day = unix_seconds % 86_400;
    let (hour, minute, second) = (in_day / 3600, in_day / 60 % 60, in_day % 60);
    let (year, month, day) = date(days);
    let month_name = MONTHS[month - 1];
    let day_name = DAYS[((days + 4) % 7) as usize]; // 1 January 1970 was a Thursday.

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let directive = chars.next().unwrap_or('%');
        // Writing to a string cannot fail.
        let _ = match directive {
            'Y' => write!(out, "{year}"),
            'y' => write!(out, "{:02}", year % 100),
            'm' => write!(out, "{month:02}"),
            'd' => write!(out, "{day:02}"),
            'e' => write!(out, "{day:2}"),
            'H' => write!(out, "{hour:02}"),
            'I' => write!(out, "{:02}", (hour + 11) % 12 + 1),
            'M' => write!(out, "{minute:02}"),
            'S' => write!(out, "{second:02}"),
            'p' => out.write_str(if hour < 12 { "AM" } else { "PM" }),
            'B' => out.write_str(month_name),
            'b' => out.write_str(&month_name[..3]),
            'A' => out.write_str(day_name),
            'a' => out.write_str(&day_name[..3]),
            'F' => write!(out, "{year}-{month:02}-{day:02}"),
            'T' => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            'Z' => out.write_str("UTC"),
            '%' => out.write_str("%"),
            unknown => write!(out, "%{unknown}"),
        };
    }
    out
}

/// Year, month from 1, day from 1 of a day counted from 1 January 1970.
fn date(mut days: u64) -> (u64, usize, u64) {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    // Whole 400-year cycles first, so that no date takes long.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        let all = "%Y-%m-%d %H:%M:%S %a %A %b %B %y %e %I %p %F %T %Z %% %q";
        assert_eq!(
            spell(all, 0),
            "1970-01-01 00:00:00 Thu Thursday Jan January 70  1 12 AM 1970-01-01 00:00:00 UTC % %q"
        );
        assert_eq!(spell("%d %b %Y", 951_782_400), "29 Feb 2000");
        assert_eq!(spell("%A, %d %B %Y %T", 1_753_488_000), "Saturday, 26 July 2025 00:00:00");
        assert_eq!(spell("%F", 4_107_542_399), "2100-02-28");
        assert_eq!(spell("%F", 4_107_542_400), "2100-03-01");
        assert!(!spell("%F %", u64::MAX).is_empty());
    }
}
