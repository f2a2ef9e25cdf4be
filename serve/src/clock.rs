//! Times as clients and logs have them: RFC 3339, in UTC.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Now, to the nanosecond.
pub fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}.{:09}Z", date_and_time(since.as_secs()), since.subsec_nanos())
}

/// So many seconds after 1970.
pub fn at(seconds: u64) -> String {
    format!("{}Z", date_and_time(seconds))
}

/// Nanoseconds, as ollama counts durations.
pub fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// `1970-01-01T00:00:00`, so many seconds after 1970.
///
/// Days are counted from the first of March, so that a leap day is the last of its year; an era of the Gregorian
/// calendar has 400 years.
pub fn date_and_time(seconds: u64) -> String {
    const DAYS_FROM_YEAR_0: u64 = 719_468;
    const ERA: u64 = 146_097;
    let days = seconds / 86_400 + DAYS_FROM_YEAR_0;
    let (era, day) = (days / ERA, days % ERA);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day_of_month:02}T{hour:02}:{minute:02}:{second:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_become_dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (68_169_600, "1972-02-29T00:00:00Z"),
            (946_684_799, "1999-12-31T23:59:59Z"),
            (13_574_563_199, "2400-02-28T23:59:59Z"),
            (13_574_563_200, "2400-02-29T00:00:00Z"),
            (16_730_323_200, "2500-03-01T00:00:00Z"),
            (253_402_300_799, "9999-12-31T23:59:59Z"),
        ] {
            assert_eq!(at(seconds), text);
        }
    }
}
