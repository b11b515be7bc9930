"""The tests of each module, in stages: files that run fast first, and slower ones after them."""

_VECTORS = ["tests/test_known_answers.py", "tests/test_vectors.py"]
# Tests of all key services: `-k` chooses those of one.
_SHARED = [
    "tests/key_services/test_extras.py",
    "tests/key_services/test_every_service.py",
    "tests/key_services/test_proxies.py",
    "tests/key_services/test_forks.py",
]

PLAN: dict[str, list[list[str]]] = {
    "formats/records.py": [
        ["tests/test_flags.py", "tests/test_records.py", "tests/test_plaintexts.py"],
        [*_VECTORS, "tests/test_backends.py"],
        ["tests/test_keys.py", "tests/test_database_vector.py"],
    ],
    "formats/audit_records.py": [["tests/test_audit_records.py"]],
    "crypto/aead.py": [["tests/test_backends.py"], _VECTORS],
    "backends/aes_gcm.py": [["tests/test_backends.py"], _VECTORS],
    "backends/fernet.py": [["tests/test_known_answers.py", "tests/test_backends.py"], _VECTORS],
    "keys/blind_index.py": [["tests/test_blind_index.py"], ["tests/test_audit_vectors.py"]],
    "keys/keyring.py": [["tests/test_keyring.py"], ["tests/test_data_keys.py", *_VECTORS]],
    "keys/data_keys.py": [
        ["tests/test_data_keys.py", "tests/test_keyring.py", *_VECTORS],
        ["tests/storage/test_operation_runner.py", "tests/attacks/test_planted_keys.py"],
        ["tests/test_audit.py", "tests/test_telemetry.py"],
    ],
    "keys/providers.py": [
        ["tests/test_keys.py", "tests/test_testing.py"],
        _VECTORS,
        ["tests/test_platforms.py"],
    ],
    "formats/blobs.py": [["tests/test_blobs.py"]],
    "hiding.py": [["tests/test_hiding.py"]],
    "keys/specs.py": [["tests/test_keys.py"]],
    "keys/passphrase.py": [["tests/test_keys.py", "tests/test_testing.py"], _VECTORS],
    "backends/noop.py": [["tests/test_backends.py"]],
    "backends/registry.py": [["tests/test_backends.py", "tests/test_named_backends.py"]],
    "crypto/package_1x.py": [["tests/test_package_1x_keys.py"]],
    "formats/times.py": [["tests/test_times.py"]],
    "formats/json_text.py": [
        ["tests/test_json_text.py"],
        ["tests/test_states.py"],
        ["tests/test_events.py"],
        ["tests/test_limits.py"],
    ],
    "formats/memory_items.py": [["tests/test_memory_items.py"]],
    "formats/events.py": [["tests/test_events.py"], ["tests/test_times.py"]],
    "formats/event_parser.py": [["tests/test_event_parser.py"]],
    "keys/remote.py": [
        ["tests/test_key_services.py", "tests/key_services/test_extras.py"],
        ["tests/key_services/test_vault.py"],
        [*_SHARED, "-k", "vault"],
    ],
    "keys/vault.py": [["tests/key_services/test_vault.py"], [*_SHARED, "-k", "vault"]],
    "keys/aws.py": [["tests/key_services/test_aws.py"], [*_SHARED, "-k", "aws"]],
    "keys/gcp.py": [["tests/key_services/test_gcp.py"], [*_SHARED, "-k", "gcp or google"]],
    "keys/pkcs11.py": [["tests/key_services/test_pkcs11.py"], [*_SHARED, "-k", "pkcs11"]],
}
