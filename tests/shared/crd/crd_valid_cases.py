# SPDX-License-Identifier: Apache-2.0
"""Specs that the CRD must accept."""

from __future__ import annotations

from typing import Any

from crd_cases import HUB, MOUNT

RIGHT: list[dict[str, Any]] = [
    {},
    {"model": {"source": "pvc://weights"}},
    {"model": {"source": "pvc://weights/qwen3/8b/", "aliases": ["a", "Qwen/Qwen3-8B"]}},
    {"replicas": 0},
    {
        "gateway": {
            "mode": "Shared",
            "apiKeys": {"secretNames": ["team-a", "team.b"], "fromLabel": True},
            "tls": {"secretName": "cert"},
            "cors": {"allowOrigins": ["https://chat.example.com", "http://localhost:3000"]},
            "admission": {"maxTokensInFlight": 1000000},
        }
    },
    {"parallelism": {"tensor": 8}, "accelerator": {"perPod": 8, "nodeSelector": {"gpu": "h200"}}},
    {"parallelism": {"tensor": 4, "expert": 2}},
    {"parallelism": {"tensor": 8, "topologyKey": "example.com/rack"}, "accelerator": {"perPod": 2}},
    {"engine": {"device": "CPU"}, "parallelism": {"tensor": 2}, "accelerator": {"perPod": 1}},
    {"engine": {"memoryFraction": 0.9}},
    {"engine": {"memoryFraction": "0.985"}},
    {"gateway": {"podTemplate": {"nodeSelector": {"pool": "cpu"}, "priorityClassName": "high"}}},
    {"engine": {"extraArgs": ["--model-x", "--eviction", "lfu"], "memoryFraction": "0.05"}},
    {
        "engine": {
            "attention": {"prefill": "FA3", "decode": "Split"},
            "quantization": "W4A16",
            "kvCacheDtype": "FP8",
            "cudaGraph": {"mode": "Disabled", "maxBatchSize": 8},
            "overlapScheduling": "Disabled",
        },
        "accelerator": {"resourceClaimTemplateName": "gpu"},
    },
    {"engine": {"device": "CPU", "attention": {"prefill": "CPU", "decode": "CPU"}}},
    {
        "gateway": {
            "processes": 2,
            "resources": {"requests": {"cpu": 2}},
            "routing": {"loadFactorPercent": 100, "warmupTokens": 0, "warmupTimeoutSeconds": 600},
            "retries": {"streamResume": "Disabled", "resumeWaitSeconds": 0},
            "toolParser": "Mistral",
            "reasoningParser": "None",
            "accessLog": "Disabled",
            "moderation": {"categories": {"S10": "hate"}},
            "playground": "Enabled",
            "grpc": "Enabled",
            "images": {"urls": "Allowed", "allowHosts": ["a-1.b2.example", "*.a.xn--p1ai", "*.example.com"]},
            "extraArgs": ["--max-body-bytes", "4096", "--breaker-failures=9"],
        },
        "observability": {
            "tracing": {
                "otlpEndpoint": "http://otel:4318/x",
                "samplingPercent": 0,
                "headersSecretRef": {"name": "otlp", "key": "headers"},
            }
        },
    },
    {"model": HUB},
    {"model": {**HUB, "source": "hf://gpt2@refs/pr/1", "endpoint": "https://hub.example.com:8443/hf"}},
    {"model": {**HUB, "source": f"oci://h:5000/a/b:v1@sha256:{'0' * 64}"}},
    {
        "model": {
            "source": "s3://models/llm/qwen3/",
            "credentialsSecretRef": {"name": "s3", "key": "credentials"},
            "cache": {
                "mode": "PersistentVolumeClaim",
                "claimName": "weights",
                "size": "200Gi",
                "storageClassName": "fast",
                "accessMode": "ReadWriteOnce",
                "whenDeleted": "Delete",
            },
        }
    },
    {"model": {"source": "oci://ghcr.io/a/b", "cache": {"mode": "HostPath", "path": "/models"}}},
    {"rollout": {"maxSurge": 0, "maxUnavailable": 1, "partition": 2, "paused": True}},
    {"rollout": {"maxSurge": "100%", "maxUnavailable": "25%", "progressDeadlineSeconds": 10}},
    {"rollout": {"maxSurge": "0%", "maxUnavailable": 1}},
    {
        "availability": {"podDisruptionBudget": "Disabled", "spreadTopologyKey": ""},
        "lifecycle": {"maxGroupRestarts": 0},
        "revisionHistoryLimit": 0,
        "networkPolicy": "Disabled",
    },
    {"engine": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}},
    {
        "podTemplate": {
            "affinity": {"nodeAffinity": {}},
            "resources": {"requests": {"cpu": 2, "memory": "1.5Gi"}, "limits": {"memory": "2e9"}},
            "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
            "volumeMounts": [{**MOUNT, "readOnly": True}],
        }
    },
    {
        "model": {"servedName": "Qwen/Qwen3-8B", "trustRemoteCode": "Disabled"},
        "accelerator": {"resourceName": "amd.com/gpu"},
        "podTemplate": {
            "labels": {"example.com/team": "a", "mizzen": "b"},
            "annotations": {"example.com/note": "mizzen.dev/x"},
            "resources": {"limits": {"nvidia.com/gpu": 1}},
        },
        "gateway": {"cors": {"allowOrigins": ["*"]}},
    },
    {
        "commonMetadata": {
            "labels": {"example.com/team": "a"},
            "annotations": {"example.com/note": "mizzen.dev/x"},
        }
    },
    {"autoscaling": {"maxReplicas": 3}},
    {"autoscaling": {"minReplicas": 3, "maxReplicas": 3, "metric": {"targetPercent": 100}}},
    {"autoscaling": {"minReplicas": 0, "maxReplicas": 1, "idleSecondsToZero": 60}},
    {"autoscaling": {"maxReplicas": 3, "metric": {"type": "QueueTokens", "targetValue": 1}}},
]
